"""Folders of images, one per class, as ImageFolder reads them, with metadata.jsonl."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from shardprep.formats.errors import UsageError
from shardprep.formats.exports.format import (
    ALL_SUFFIXES,
    SUFFIXES,
    ExportFormat,
    ExportRecord,
    ExportSource,
    JobFolders,
    corners,
    digest_names,
    find_repeated,
    in_chunks,
    publish_file,
    real_array,
    split_key,
    suffix_of,
)
from shardprep.formats.images.header import kind_of
from shardprep.formats.runtime.files import flush_file, make_read_only, name_in_os_errors, publish_bytes
from shardprep.formats.shards.read import FileEntry, Rows

METADATA = "metadata.jsonl"
MAX_NAME_BYTES = 255
FLUSHES = 16
_UNSAFE = re.compile(r'[%/\\:*?"<>|\x00-\x1f\x7f]|^\.|[. ]$')
_CASED = re.compile(r"[^a-z0-9_~ -]")


class Folders(ExportFormat):
    """Image files in folders of their classes; files without a label lie beside the folders.

    A file's path is its key, without the class's folder in front. If two paths differ only in case, each file
    has its whole key as one name, with all but lower-case letters quoted. Columns and boxes are in
    metadata.jsonl, one line per file.
    """

    name = "folders"
    unit_names = "images-{number:05d}"
    overhead = 2048  # the mean unused part of a file's last block
    box_names = ("objects",)

    def __init__(self, source: ExportSource, index: Rows, report_done: Callable[[int], None]) -> None:
        super().__init__(source, index, report_done)
        if not source.has_images:
            raise UsageError("has no images, so it cannot be exported to folders", path=source.path)
        for field in source.schema:
            if field.kind in ("image", "bytes"):
                raise self.cannot_hold(field, f"{METADATA} cannot hold bytes")
            if field.name.lower() == "file_name":
                raise self.cannot_hold(field, f"{METADATA} uses that name for the image", "another format")
        self.has_parts = source.has_boxes or len(source.schema) > 0
        classes = [each.name for each in source.labels.classes]
        if "" in classes:
            raise UsageError("has a class without a name, so it has no folder", path=source.path)
        plain = [quote_folder(name) for name in classes]
        numbers = digest_names(plain)
        twice = find_repeated(numbers)
        self._classes = [
            quote_caseless(name) if number in twice else folder
            for name, folder, number in zip(classes, plain, numbers.tolist(), strict=True)
        ]
        if self._classes != sorted(self._classes):
            self.note = (
                "ImageFolder numbers these classes in another order, because quoted names sort differently"
            )
        self._repeated: frozenset[int] = frozenset()
        self._repeated = find_repeated(digest_names(self._check_names(index, report_done)))
        if self._repeated and find_repeated(digest_names(self._check_names(index, report_done))):
            raise UsageError("has keys that cannot be turned into different file names", path=source.path)

    def _check_names(self, index: Rows, report_done: Callable[[int], None]) -> Iterator[str]:
        for rows in in_chunks(index, report_done):
            for name, key in zip(self.names(rows), rows["key"].tolist(), strict=True):
                if max(map(len, name.encode().split(b"/"))) > MAX_NAME_BYTES:
                    issue = f"needs a file name of more than {MAX_NAME_BYTES} bytes; export to another format"
                    raise UsageError(issue, path=self.source.path, key=key.decode())
                yield name

    def names(self, rows: Rows) -> list[str]:
        columns = [rows[name].tolist() for name in ("key", "label", "flags", "components")]
        plain = [self._plain_name(*values) for values in zip(*columns, strict=True)]
        if not self._repeated:
            return plain
        for place, (number, *values) in enumerate(zip(digest_names(plain).tolist(), *columns, strict=True)):
            if number in self._repeated:
                key, label, flags, components = values
                name = f"{quote_caseless(key.decode())}.{suffix_of(kind_of(flags), components)}"
                plain[place] = name if label < 0 else f"{self._classes[label]}/{name}"
        return plain

    def _plain_name(self, key: bytes, label: int, flags: int, components: int) -> str:
        text, kind = key.decode(), kind_of(flags)
        suffix = suffix_of(kind, components)
        if label < 0:
            return add_suffix(quote_file(text), kind, suffix)  # a folder would be a class
        own = self.source.labels.classes[label].name + "/"
        *parents, name = split_key(text.removeprefix(own) or text)
        path = [self._classes[label], *map(quote_folder, parents), add_suffix(quote_file(name), kind, suffix)]
        return "/".join(path)

    def build(self, name: str, records: Iterable[ExportRecord], count: int, folders: JobFolders) -> FileEntry:
        """Write and flush all files, then rename them, then flush the folders."""
        digest, size = hashlib.sha256(), 0
        built: dict[Path, Path] = {}
        lines = []
        for number, record in enumerate(records):
            path = folders.run / f"{name}-{number}.tmp"
            with name_in_os_errors(path), path.open("wb") as file:
                file.write(record.image)
            built[path] = folders.output / record.name
            size += len(record.image)
            _update_digest(digest, record.name, record.image)
            lines.append(self._line(record))
        with ThreadPoolExecutor(FLUSHES) as disk:  # a disk merges concurrent flushes
            list(disk.map(flush_file, built))
        changed = {folders.output}
        for path, final in built.items():
            make_read_only(path)
            if final.parent not in changed:
                final.parent.mkdir(parents=True, exist_ok=True)
                changed.update(each for each in final.parents if each.is_relative_to(folders.output))
            path.replace(final)
        for folder in sorted(changed):
            flush_file(folder)
        if self.has_parts:
            publish_bytes(folders.work / f"{name}.jsonl", b"".join(lines), folders.run)
        return FileEntry(name, size, f"sha256:{digest.hexdigest()}", len(built))

    def is_intact(self, unit: FileEntry, names: Sequence[str], output: Path) -> bool:
        digest = hashlib.sha256()
        for name in names:
            try:
                _update_digest(digest, name, (output / name).read_bytes())
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
                return False
        return unit.sha256 == f"sha256:{digest.hexdigest()}"

    def finish(self, units: Sequence[FileEntry], folders: JobFolders) -> list[FileEntry]:
        if self.source.has_labels:
            for folder in self._classes:  # also of empty classes: ImageFolder numbers the folders
                (folders.output / folder).mkdir(exist_ok=True)
            flush_file(folders.output)
        if not self.has_parts:
            return []
        parts = ((folders.work / f"{unit.name}.jsonl").read_bytes() for unit in units)
        records = sum(unit.records for unit in units)
        return [publish_file(METADATA, records, folders, lambda file: file.writelines(parts))]

    def _line(self, record: ExportRecord) -> bytes:
        values: dict[str, Any] = {"file_name": record.name, "key": record.key, "label": record.label}
        if record.boxes is not None:
            values["objects"] = {"bbox": corners(record.boxes), "category": record.boxes["label"].tolist()}
        for field in self.source.schema:
            value = record.columns[field.name]
            if field.kind not in ("json", "text"):
                value = _replace_nan(real_array(value).tolist())  # NaN and infinities become null
            values[field.name] = value
        return json.dumps(values, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def _update_digest(digest: Any, name: str, image: bytes) -> None:
    digest.update(f"{len(name.encode())} {len(image)} {name}".encode())
    digest.update(image)


def _replace_nan(value: Any) -> Any:
    if isinstance(value, list):
        return [_replace_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def quote_file(part: str) -> str:
    """Return a part of a path as a file name that is not hidden, and valid on any file system.

    >>> quote_file(".."), quote_file("what?")
    ('%2E%2E', 'what%3F')
    """
    return "%2E%2E" if part == ".." else _UNSAFE.sub(_quote, part)


def quote_folder(part: str) -> str:
    """Return a part of a path as a folder name, which never looks like an image file's."""
    stem, dot, suffix = quote_file(part).rpartition(".")
    return f"{stem}%2E{suffix}" if dot and suffix.lower() in ALL_SUFFIXES else stem + dot + suffix


def quote_caseless(part: str) -> str:
    """Return a name that is unique for each text, even on file systems that ignore case.

    >>> quote_caseless("Cat.1"), quote_caseless("cat.1")
    ('%43at%2E1', 'cat%2E1')
    """
    return _CASED.sub(_quote, part)


def add_suffix(name: str, kind: str, suffix: str) -> str:
    """Return the name with the suffix appended, unless it already has one of the image's kind."""
    has_one = "." in name and name.rpartition(".")[2].lower() in SUFFIXES[kind]
    return name if has_one else f"{name}.{suffix}"


def _quote(match: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in match[0].encode())
