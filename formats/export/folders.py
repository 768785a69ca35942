"""Folders of images, one for each class, as ImageFolder reads them; and metadata.jsonl."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from shardprep.formats.columns.schema import Field
from shardprep.formats.containers.published_file import FileEntry
from shardprep.formats.containers.table import Rows
from shardprep.formats.errors import UsageError
from shardprep.formats.processes.thread_start import starting_thread
from shardprep.formats.system.atomic_write import flush_file, hash_file, publish_bytes, publishing
from shardprep.formats.system.regular_file import naming

from .export_format import Exportable, ExportFormat, Places, cannot_hold, refuse_taken
from .export_record import ExportRecord, corners, kind_of
from .names import (
    caseless_part,
    digests,
    file_part,
    folder_part,
    parts_of,
    repeated,
    suffix_of,
    with_suffix,
)

METADATA = "metadata.jsonl"
MOST_NAME_BYTES = 255
FLUSHES = 16
RESERVED = ("file_name", "objects")


class Folders(ExportFormat):
    """Image files in a folder of their class, those without label beside the folders.

    A file has the path of its key, without the class's folder in front. Where file systems that ignore case
    would take two for one, both have the whole key in one name, with all but lower-case letters quoted.
    Columns and boxes are in metadata.jsonl, one line for each file.
    """

    name = "folders"

    def __init__(self, source: Exportable, index: Rows) -> None:
        super().__init__(source, index)
        if not source.has_images:
            raise UsageError("has no images, and cannot be exported to folders", path=source.path)
        for field in source.schema:
            if field.kind in ("image", "bytes"):
                raise cannot_hold(self.name, field, f"{METADATA} holds no bytes")
            refuse_taken(self.name, field, RESERVED)
        self.has_parts = source.has_boxes or len(source.schema) > 0
        self._classes = _class_folders([each.name for each in source.labels.classes])
        self._repeated: frozenset[int] = frozenset()
        self._repeated = repeated(self._checked(index))
        if self._repeated and repeated(self._checked(index)):
            raise UsageError("has keys of which no different names of files can be made", path=source.path)

    def _checked(self, index: Rows) -> Any:
        names = self.names(index)
        for name, key in zip(names, index["key"].tolist(), strict=True):
            if any(len(part.encode()) > MOST_NAME_BYTES for part in name.split("/")):
                raise UsageError(
                    f"makes a name of more than {MOST_NAME_BYTES} bytes, which no file can have; export to another "
                    "format",
                    path=self.source.path,
                    key=key.decode(),
                )
        return digests(names)

    def unit_name(self, number: int, count: int) -> str:
        return f"images-{number:05d}"

    def names(self, rows: Rows) -> list[str]:
        columns = (rows[name].tolist() for name in ("key", "label", "flags", "components"))
        plain = [self._plain(*values) for values in zip(*columns, strict=True)]
        if not self._repeated:
            return plain
        return [
            self._caseless(row) if number in self._repeated else name
            for name, number, row in zip(plain, digests(plain).tolist(), rows, strict=True)
        ]

    def _plain(self, key: bytes, label: int, flags: int, components: int) -> str:
        text, kind = key.decode(), kind_of(flags)
        suffix = suffix_of(kind, components)
        if label < 0:
            return with_suffix(file_part(text), kind, suffix)  # not in a folder, which would be a class
        own = self.source.labels.classes[label].name + "/"
        *folders, name = parts_of(text.removeprefix(own) or text)
        path = [self._classes[label], *map(folder_part, folders), with_suffix(file_part(name), kind, suffix)]
        return "/".join(path)

    def _caseless(self, row: np.void) -> str:
        key, label, kind = row["key"].decode(), int(row["label"]), kind_of(int(row["flags"]))
        name = f"{caseless_part(key)}.{suffix_of(kind, int(row['components']))}"
        return name if label < 0 else f"{self._classes[label]}/{name}"

    def bytes_beside(self) -> int:
        return 4096 + 256 * (1 + len(self.source.schema))

    def build(self, name: str, records: Iterable[ExportRecord], count: int, places: Places) -> FileEntry:
        """Write all files, flush them, then give them their names, then flush the folders."""
        digest, size = hashlib.sha256(), 0
        built: dict[Path, Path] = {}
        lines = []
        for number, record in enumerate(records):
            path = places.run / f"{name}-{number}.tmp"
            with naming(path), path.open("wb") as file:
                file.write(record.image)
            built[path] = places.output / record.name
            size += len(record.image)
            _add(digest, record.name, record.image)
            lines.append(self._line(record))
        _publish(built, places.output)
        if self.has_parts:
            publish_bytes(_part(places, name), b"".join(lines), places.run)
        return FileEntry(name, size, f"sha256:{digest.hexdigest()}", len(built))

    def is_intact(self, unit: FileEntry, names: Sequence[str], output: Path) -> bool:
        digest = hashlib.sha256()
        for name in names:
            path = output / name
            try:
                if path.is_symlink():
                    return False
                _add(digest, name, path.read_bytes())
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
                return False
        return unit.sha256 == f"sha256:{digest.hexdigest()}"

    def finish(self, units: Sequence[FileEntry], places: Places) -> list[FileEntry]:
        if self.source.has_labels:
            for folder in self._classes:  # ImageFolder numbers the folders that are there
                (places.output / folder).mkdir(exist_ok=True)
        if not self.has_parts:
            return []
        final = places.output / METADATA
        with publishing(final, places.run) as file:
            for unit in units:
                file.write(_part(places, unit.name).read_bytes())
        return [
            FileEntry(METADATA, final.stat().st_size, hash_file(final), sum(unit.records for unit in units))
        ]

    def _line(self, record: ExportRecord) -> bytes:
        values: dict[str, Any] = {"file_name": record.name, "key": record.key, "label": record.label}
        if record.boxes is not None:
            values["objects"] = {"bbox": corners(record.boxes), "category": record.boxes["label"].tolist()}
        values |= {field.name: _jsonable(field, record.columns[field.name]) for field in self.source.schema}
        return json.dumps(values, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def _class_folders(classes: list[str]) -> list[str]:
    folders = [folder_part(name) for name in classes]
    numbers = digests(folders)
    twice = repeated(numbers)
    return [
        caseless_part(name) if number in twice else folder
        for name, folder, number in zip(classes, folders, numbers.tolist(), strict=True)
    ]


def _add(digest: Any, name: str, image: bytes) -> None:
    digest.update(f"{len(name.encode())} {len(image)} {name}".encode())
    digest.update(image)


def _publish(built: dict[Path, Path], output: Path) -> None:
    with ThreadPoolExecutor(FLUSHES) as disk, starting_thread():  # a disk takes many flushes as one
        for _ in disk.map(flush_file, built):
            pass
    for path in built:
        path.chmod(0o444)
    folders = {output}
    for path, final in built.items():
        if final.parent not in folders:
            final.parent.mkdir(parents=True, exist_ok=True)
            folders.update(parent for parent in final.parents if parent.is_relative_to(output))
        path.replace(final)
    for folder in sorted(folders):
        flush_file(folder)


def _part(places: Places, name: str) -> Path:
    return places.work / f"{name}.jsonl"


def _jsonable(field: Field, value: Any) -> Any:
    """Return a value of JSON: arrays as lists, complex numbers as two, NaN and infinities as None."""
    if field.kind in ("json", "text"):
        return value
    array = np.asarray(value)
    if array.dtype.kind == "c":
        array = np.stack([array.real, array.imag], axis=-1)
    return _finite(array.tolist())


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
