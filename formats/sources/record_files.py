"""Shared base of Parquet, TFRecord and WebDataset: splits, classes, usual names, and reading by offset."""

from __future__ import annotations

import re
import struct
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import SourceDamaged, UsageError
from shardprep.formats.images.header import is_image_file
from shardprep.formats.records.record import MAX_IMAGE_BYTES, MAX_KEY_BYTES, UNLABELLED
from shardprep.formats.records.schema import RESERVED, BadValue, Field, Schema
from shardprep.formats.runtime.files import CHANGED, ArchiveFile, ReadAt, errors_as_damage
from shardprep.formats.runtime.json_record import is_text
from shardprep.formats.runtime.progress import Progress, count_of
from shardprep.formats.shards.dataset import SPLITS
from shardprep.formats.sources.listing import MAX_CLASSES, Classes, GrowingTable, official_key, repeated_keys
from shardprep.formats.sources.source import (
    SPLIT_NAMES,
    ByteReader,
    Entries,
    Listing,
    Problems,
    ResourceReader,
    Source,
    SourceOptions,
    entry_dtype,
    split_folders,
    split_from_name,
)
from shardprep.formats.sources.tar import describe_archive
from shardprep.formats.sources.trees import NOT_UTF8, FolderWalk, holds_images, wrap_mtime

_PIECE, _PIECES = 1 << 12, 4  # bytes of a piece, and pieces to keep
MAX_VARINT = 10  # bytes
HEAD_BYTES = 64  # of an image, to recognise its kind


class ByteWindow:
    """The bytes of a file from ``start`` to ``end``, read in small pieces when needed. Not thread-safe."""

    def __init__(self, read_at: ReadAt, start: int, end: int) -> None:
        self.start, self.end = start, end
        self._read_at = read_at
        self._pieces: list[tuple[int, bytes]] = []

    @classmethod
    def of(cls, data: bytes) -> Self:
        return cls(lambda length, offset: data[offset : offset + length], 0, len(data))

    @property
    def length(self) -> int:
        return self.end - self.start

    def take(self, start: int, end: int) -> bytes:
        """Return the bytes between two offsets of the file. Raises ValueError if there are too few."""
        for at, piece in self._pieces:
            if at <= start and end <= at + len(piece):
                return piece[start - at : end - at]
        if end > self.end:
            raise ValueError("it is truncated")
        piece = self._read_at(min(max(end - start, _PIECE), self.end - start), start)
        self._pieces = [(start, piece), *self._pieces[: _PIECES - 1]]
        return piece[: end - start]


class Cursor:
    """A position ``at`` in a window to read on from. Raises ValueError at the window's end."""

    def __init__(self, window: ByteWindow) -> None:
        self.window, self.at = window, window.start

    def skip(self, length: int) -> int:
        """Skip the next ``length`` bytes, and return their start."""
        start = self.at
        if length > self.window.end - start:
            raise ValueError("it is truncated")
        self.at += length
        return start

    def take(self, length: int) -> bytes:
        """Return the next ``length`` bytes."""
        start = self.skip(length)
        return self.window.take(start, self.at)

    def read_number(self, layout: str) -> Any:
        """Read the next number in a ``struct`` layout."""
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]


def read_varint(data: bytes, start: int) -> tuple[int, int]:
    """Return the number at a position, 0 to 2**64 - 1, and the position after it. Raises ValueError."""
    if start < len(data) and (number := data[start]) < 0x80:  # most are one byte
        return number, start + 1
    number = 0
    for place, byte in enumerate(data[start : start + MAX_VARINT]):
        number |= (byte & 0x7F) << 7 * place
        if byte < 0x80 and number < 1 << 64:
            return number, start + place + 1
    raise ValueError("a number is truncated, or has more than 64 bits")


@lru_cache(1 << 12)
def column_name(name: str) -> str:
    """Return a valid column name for a name in a file: ``image.height`` for ``image/height``.

    Invalid characters become ``_``, which is also appended to reserved names.
    """
    plain = re.sub("[^A-Za-z0-9_.-]", "_", name.replace("/", "."))
    plain = f"_{plain}" if plain[:1] in ("", ".", "-") else plain
    return f"{plain}_" if plain.lower() in RESERVED else plain


@contextmanager
def name_source_in_errors(path: Path) -> Iterator[None]:
    """Add the path to a UsageError without one, such as for an invalid column name."""
    try:
        yield
    except UsageError as error:
        raise UsageError(error.message, path=error.path or path) from error


ADVICE = "copy or download the file again"
MAX_OPEN = 64  # files; a stored order alternates between them


@dataclass
class OpenFiles:
    """A reader's open files with their contexts, least recently used first, and its cached records."""

    files: OrderedDict[bytes, tuple[Any, ExitStack]] = field(default_factory=OrderedDict)
    records: OrderedDict[tuple[bytes, int], Any] = field(default_factory=OrderedDict)
    record_bytes: int = 0


@dataclass
class FilesReader(ResourceReader[OpenFiles]):
    """Reader of records in files below ``top``, which must be unchanged since they were listed."""

    top: Path
    schema: Schema
    layout: Any

    @contextmanager
    def open_resource(self) -> Iterator[OpenFiles]:
        open_files = OpenFiles()
        with ExitStack() as stack:  # all are closed, also if one of them has changed
            try:
                yield open_files
            finally:
                for _, context in open_files.files.values():
                    stack.push(context)

    def open_file(self, archive: ArchiveFile, context: ExitStack) -> Any:
        """Return an object to read the file with, which the context closes."""
        return archive

    @abstractmethod
    def read_record(self, file: Any, entry: np.void) -> Any:
        """Read the entry's record from an open file. Raises SourceDamaged, OSError."""

    @abstractmethod
    def value(self, column: Field, record: Any, entry: np.void) -> Any:
        """Return a column's value in the entry's record. Raises BadValue, SourceDamaged, …"""

    def values(self, entry: np.void) -> tuple[bytes, ...]:
        record, values, name = self.record(entry), [], ""
        place, key = self.location_of(entry), entry["key"].decode()
        try:
            with errors_as_damage(place, ADVICE, key=key, place=lambda: f"the column {name}: "):
                for column in self.schema:
                    name = column.name
                    values.append(column.codec.encode(self.value(column, record, entry)))
        except BadValue as error:
            message = f"the column {name}: {error.message} (to omit it, choose others with --column)"
            raise BadValue(message, path=place, key=key) from error
        return tuple(values)

    def record(self, entry: np.void) -> Any:
        """Return the entry's record, which is cached until another one is read."""
        file, records = self.file_of(entry), self.resource.records
        place = (entry["path"].item(), int(entry["offset"]))
        if place not in records:
            record = self.read_record(file, entry)
            records.clear()
            records[place] = record
        return records[place]

    def location_of(self, entry: np.void) -> str:
        return f"{self.path_of(entry)}, byte {entry['offset']}"

    def path_of(self, entry: np.void) -> Path:
        return self.top / str(entry["path"], "utf-8")

    def file_of(self, entry: np.void) -> Any:
        """Return the entry's open file. Raises SourceDamaged if it has changed, OSError."""
        files, path = self.resource.files, entry["path"].item()
        if path not in files:
            with ExitStack() as context:
                archive = context.enter_context(ArchiveFile(self.path_of(entry)))
                if wrap_mtime(archive.identity.mtime_ns) != entry["mtime_ns"]:
                    raise self.changed_error(entry)
                archive.expect_random_reads()
                files[path] = self.open_file(archive, context), context.pop_all()
            if len(files) > MAX_OPEN:
                files.popitem(last=False)[1][1].close()
        files.move_to_end(path)
        return files[path][0]

    def changed_error(self, entry: np.void) -> SourceDamaged:
        """Return the error for a record that has changed since it was listed."""
        return SourceDamaged(CHANGED, path=self.location_of(entry), key=entry["key"].decode())


OTHER_FILES = "other files"
_DATA = "data"  # the folder of files on the Hugging Face Hub
_LAST_NUMBER = re.compile(r"(.*?)(\d{1,9})(\D*)", re.ASCII | re.DOTALL)
_NUMBERED = re.compile(r"(.*-)(\d{1,9})(-of-)(\d{1,9})(?!\d)(.*)", re.ASCII | re.DOTALL)


@dataclass(frozen=True)
class SplitFiles:
    """The files of each split, sorted and relative to ``top``; ``ignored`` counts other files."""

    top: Path
    by_split: Mapping[str, tuple[str, ...]]
    ignored: Mapping[str, int] = field(default_factory=dict)
    problems: Problems = field(default_factory=Problems)

    @property
    def stems(self) -> set[str]:
        return {name.rpartition(".")[0] for names in self.by_split.values() for name in names}

    def describe_missing(self, split: str) -> str:
        """Return a phrase on missing files, from names like ``train-00003-of-01024``; empty for none."""
        series: dict[tuple[str, ...], set[int]] = {}
        for match in filter(None, map(_NUMBERED.fullmatch, self.by_split[split])):
            series.setdefault((match[1], match[3] + match[4]), set()).add(int(match[2]))
        for (before, of), numbers in sorted(series.items()):
            count = int(of.removeprefix("-of-"))
            if (missing := count - len(numbers)) > 0:
                first = next(number for number in range(count) if number not in numbers)
                width = len(of) - len("-of-")
                return f"it lacks {missing} of {count} files, the first is {before}{first:0{width}d}{of}"
        return ""

    def gap_notes(self, split: str) -> Iterator[str]:
        """Yield notes on files that may be missing: a few gaps in names like ``train-000017.tar``."""
        series: dict[tuple[str, str, int], set[int]] = {}
        for match in filter(None, map(_LAST_NUMBER.fullmatch, self.by_split[split])):
            series.setdefault((match[1], match[3], len(match[2])), set()).add(int(match[2]))
        for (before, after, width), numbers in sorted(series.items()):
            if 0 < (gaps := max(numbers) - min(numbers) + 1 - len(numbers)) < len(numbers):
                first = next(number for number in range(min(numbers), max(numbers)) if number not in numbers)
                yield f"{count_of(gaps, 'file')} may be missing, first {before}{first:0{width}d}{after}"


def find_split_files(
    path: Path, split: str | None, names: re.Pattern[str], *, follow_symlinks: bool = False
) -> SplitFiles | None:
    """Return the files whose names match, at a path or in the folder there, else None.

    A single file is ``split``, the split in its name, or train; files without splits in their names are
    ``split`` or train. Raises UsageError for a folder where only some names have a split, and OSError.
    """
    if not path.is_dir():
        if not names.fullmatch(path.name):
            return None
        return SplitFiles(path.parent, {split or split_from_name(path.name) or "train": (path.name,)})
    walk = FolderWalk(path, follow_symlinks)

    def matching(place: str) -> list[str]:
        files = walk.files(place)
        matches = [f"{place}/{file.path}".lstrip("/") for file in files if names.fullmatch(file.path)]
        if matches and len(matches) < len(files):
            walk.ignored[OTHER_FILES] += len(files) - len(matches)
        return matches

    for place in ("", _DATA):
        if (path / place).is_dir() and (grouped := _group_by_split(path / place, place, matching, split)):
            by_split = {each: tuple(grouped[each]) for each in SPLITS if each in grouped}
            return SplitFiles(path, by_split, walk.ignored, walk.problems)
    folders = (path, *(path / name for name in (_DATA, *SPLIT_NAMES)))
    beside = (each for folder in folders if folder.is_dir() for each in folder.iterdir())
    if any(names.fullmatch(file.name) and (file.is_symlink() or not is_text(file.name)) for file in beside):
        walk.problems.raise_all()  # all files may be links, or have no valid names
    return None


def _group_by_split(
    folder: Path, place: str, matching: Callable[[str], list[str]], split: str | None
) -> dict[str, list[str]]:
    """Return the files of each split, by folder or name; none if a split's folder has folders or no files."""
    if folders := split_folders(folder):
        if any(_subfolders(folder / name) for name in folders.values()):
            return {}
        by_split = {each: matching(f"{place}/{name}".lstrip("/")) for each, name in folders.items()}
        return by_split if all(by_split.values()) else {}
    files, by_split = matching(place), {}
    if files and any(holds_images(each, 1) for each in _subfolders(folder)):
        return {}  # class folders, and files beside them
    for file in files:
        by_split.setdefault(split_from_name(file.rpartition("/")[2]) or "", []).append(file)
    without = by_split.pop("", [])
    if without and by_split:
        named = next(iter(by_split.values()))[0]
        raise UsageError(
            f"{named} is named after a split and {without[0]} is not; rename one of them, or give a "
            "folder for each split",
            path=folder,
        )
    return {split or "train": without} if without else by_split


def _subfolders(folder: Path) -> list[Path]:
    return [each for each in folder.iterdir() if each.is_dir() and not each.name.startswith(".")]


@dataclass(frozen=True)
class RecordSource(Source):
    """Records in files; the labels and classes are the same in all splits.

    ``layout`` tells the format's ``CONTENTS`` and reader which parts of a record are its image and its label.
    """

    OPTIONS = ("image_column", "label_column", "columns")
    CONTENTS: ClassVar[type[RecordContents]]

    files: SplitFiles
    source_options: SourceOptions
    layout: Any = None

    def __post_init__(self) -> None:
        first = next(iter(self.files.by_split.values()))[0]
        if not is_text(first):  # a single file; others are listed by a walk
            raise SourceDamaged(NOT_UTF8, path=self.files.top / first)

    def new_contents(self, split: str, classes: Classes) -> RecordContents:
        return self.CONTENTS(self, classes)

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self.files.by_split)

    @property
    def description(self) -> str:
        counts = (
            f"{split} in {count_of(len(names), 'file')}" for split, names in self.files.by_split.items()
        )
        return f"{self.LAYOUT}: {', '.join(counts)}"

    @property
    def folders(self) -> tuple[Path, ...]:
        places = (Path(name).parent for names in self.files.by_split.values() for name in names)
        return tuple(dict.fromkeys((self.files.top / place).resolve() for place in places if place.name))

    def list_split(self, split: str, known_entries: Entries | None) -> Listing:
        contents = self.contents_by_split[split]
        return Listing(
            split,
            self.LAYOUT,
            contents.entries,
            contents.classes.assign_labels()[0],
            contents.reader(),
            archives=tuple(describe_archive(self.files.top / name) for name in self.files.by_split[split]),
            expected=contents.expected,
            shortfall=self.files.describe_missing(split) or contents.shortfall,
            problems=contents.problems,
            ignored=dict(self.files.ignored) if split == self.splits[0] else {},
            notes=(
                *label_note(contents.schema, contents.entries, self.source_options),
                *self.files.gap_notes(split),
            ),
            options=self.source_options.kept("follow_symlinks", *self.OPTIONS) | contents.options,
            schema=contents.schema,
            has_images=contents.has_images,
            random_read_bytes=contents.random_read_bytes,
        )

    @cached_property
    def contents_by_split(self) -> dict[str, RecordContents]:
        classes, by_split = Classes(), dict[str, RecordContents]()
        for split, names in self.files.by_split.items():
            paths = [self.files.top / name for name in names]
            size = sum(path.stat().st_size for path in paths if path.is_file())
            with self.progress.task(f"list {split}", records=0, size=size):
                contents = self.new_contents(split, classes)
                if not by_split:
                    contents.problems.merge(self.files.problems)
                by_split[split] = contents.scan(names, self.progress)
        labels = classes.assign_labels()[1]
        schemas = [contents.schema for contents in by_split.values()]
        for contents in by_split.values():
            contents.entries["label"] = labels[contents.entries["label"]]
            contents.schema = Schema(_widen(field, schemas) for field in contents.schema)
        kinds = {name: kind for each in by_split.values() for name, kind in each.schema.kinds.items()}
        for name, kind, origin in self.source_options.column_choices:
            if name not in kinds:
                lacking = f"no record has a column {name!r} besides image and label"
                raise UsageError(lacking, path=self.files.top)
            if origin != name or kind not in ("", kinds[name]):
                keeps = f"keeps its name and its kind, {kinds[name]}; give --column {name}"
                raise UsageError(f"the column {name} {keeps}", path=self.files.top)
        return by_split


_WIDER_KINDS = {"int": "int64[*]", "float": "float32[*]", "json": "float"}  # of another split's column
_NOT_IN_JSON = ("json", "float", "image")


def _widen(field: Field, schemas: Iterable[Schema]) -> Field:
    """Return the field, or with the kind of this column in another split if that holds its values, too."""
    kinds = {each.kind for schema in schemas for each in schema if each.name == field.name}
    wider = {_WIDER_KINDS.get(field.kind), None if field.kind in _NOT_IN_JSON else "json"}
    return Field(field.name, wide.pop()) if (wide := kinds & wider) else field


class RecordContents(ABC):
    """The records of a split, read so far from a ``source``; all splits share the ``classes``.

    Labels may be text (``allows_text``) if the user named their column. Keys are the names of the records. If
    any is missing or repeated, all keys are made of file and number if ``can_number_keys``, else these are
    problems, as are records over the limits.
    """

    READER: ClassVar[type[FilesReader]]
    can_number_keys: ClassVar[bool] = True
    entries: Entries
    schema = Schema()
    has_images = True
    expected: int | None = None
    shortfall = ""
    boxes: npt.NDArray[np.void] | None = None  # with the numbers of their entries
    random_read_bytes = 0

    def __init__(self, source: RecordSource, classes: Classes) -> None:
        self.top, self.layout, self.classes = source.files.top, source.layout, classes
        self.allows_text = source.source_options.label_column is not None
        self.takes = source.source_options.takes
        self.problems = Problems()
        self.options: dict[str, Any] = {}  # which the manifest keeps beside those of the user
        self._current_file = b"", 0
        self._table = GrowingTable(entry_dtype(1, 1))

    @abstractmethod
    def read(self, file: ArchiveFile) -> None:
        """Read the records of a file. Raises SourceDamaged where no more can be read."""

    @abstractmethod
    def columns(self) -> tuple[Schema, bool]:
        """Return the columns, and whether records have images. Raises UsageError for invalid columns."""

    def reader(self) -> ByteReader:
        return self.READER(self.top, self.schema, self.layout)

    def scan(self, names: Iterable[str], progress: Progress) -> Self:
        """Read all files; unreadable ones are problems."""
        done = 0
        for name in names:
            with self.problems.collect(), ArchiveFile(self.top / name) as file:
                self._current_file = name.encode(), wrap_mtime(file.identity.mtime_ns)
                file.expect_random_reads()
                self.read(file)
                done += file.end
                progress.at(0, done)
        with name_source_in_errors(self.top):
            self.schema, self.has_images = self.columns()
        self.entries = self._finish_entries()
        return self

    def append(self, name: str, label: int, *, length: int, offset: int) -> bool:
        """Append a record of the current file with its name, "" for none. Returns False if it is refused."""
        path, mtime_ns = self._current_file
        if length > MAX_IMAGE_BYTES:
            too_large = f"has {length} bytes, but no record may have more than {MAX_IMAGE_BYTES}; remove it"
            place = f"{self.top / path.decode()}, byte {offset}"
            self.problems.add(SourceDamaged(too_large, path=place, key=name), "too large")
            return False
        self._table.append((key_of(name), path, label, length, offset, mtime_ns))
        return True

    def label_of(self, label: object) -> int:
        """Return the number of a record's label, None for none. Raises ValueError for an invalid one."""
        if label is None:
            return UNLABELLED
        if isinstance(label, str | bytes) and self.allows_text:
            return self.classes.add_text(label)
        if isinstance(label, bool) or not isinstance(label, int | np.integer):
            advice = f"--label-column {self.layout.label or 'label'} takes text for the names of classes"
            integer = f"an integer from {UNLABELLED} to {MAX_CLASSES - 1}"
            raise ValueError(f"its label is {str(label)[:80]!r}, not {integer}; {advice}")
        return self.classes.add_number(int(label))

    def _finish_entries(self) -> Entries:
        entries = self._table.finish()
        repeated = repeated_keys(entries["key"])
        if self.can_number_keys and (
            repeated or (entries["key"] == b"").any()
        ):  # such as train-00000/00000017
            paths, numbers = entries["path"], np.arange(len(entries))
            starts = np.append(True, paths[1:] != paths[:-1])
            numbers -= np.maximum.accumulate(np.where(starts, numbers, 0))
            keys = np.char.add(np.char.add(paths, b"/"), np.char.zfill(numbers.astype("S"), 8))
            entries = entries.astype(entry_dtype(keys.dtype.itemsize, paths.dtype.itemsize))
            entries["key"] = keys
            return entries
        for entry in entries[entries["key"] == b""]:
            no_key = f"has a name of more than {MAX_KEY_BYTES} bytes, or one that is not text; shorten it"
            self.problems.add(SourceDamaged(no_key, path=self.reader().location_of(entry)), "no key")
        if named := [*filter(None, repeated)]:
            both = entries[np.flatnonzero(entries["key"] == named[0])[:2]]
            first, second = (self.reader().location_of(entry) for entry in both)
            twice = f"begins here and again at {first}; a sample must be contiguous"
            error = SourceDamaged(twice, path=second, key=named[0].decode())
            self.problems.add(error, "twice", len(named))
        return entries


def key_of(name: str) -> bytes:
    """Return the key for a name, as in other sources for images of ILSVRC12; empty for an invalid key."""
    key = (official_key(name.rpartition("/")[2]) or name).encode(errors="surrogateescape")
    try:
        key.decode()
    except UnicodeDecodeError:
        return b""
    return key if len(key) <= MAX_KEY_BYTES and b"\0" not in key else b""


# Names in lower case, with ``_`` for anything but letters and digits
IMAGE_NAMES = re.findall(
    r"\w+",
    "image img image_encoded encoded_image image_raw raw_image image_bytes image_data image_buffer encoded jpg jpeg "
    "png webp jpg_bytes jpeg_bytes png_bytes webp_bytes picture photo",
)
LABEL_NAMES = re.findall(
    r"\w+",
    "label labels image_class_label class cls class_id class_label label_id target category category_id",
)
_NO_LETTERS = re.compile(r"[^a-z0-9]+")


def find_known_names(names: Iterable[str], known: Sequence[str]) -> list[str]:
    """Return the names that are in ``known``, which is IMAGES or LABELS, in its order."""
    plain = {name: _NO_LETTERS.sub("_", name.lower()) for name in names}
    return sorted((name for name in plain if plain[name] in known), key=lambda name: known.index(plain[name]))


def guess_image(names: Iterable[str], value_of: Callable[[str], object]) -> str:
    """Return the first usual name whose value in the first record is an image, "" for none."""
    values = ((name, value_of(name)) for name in find_known_names(names, IMAGE_NAMES))
    return next((name for name, value in values if isinstance(value, bytes) and is_image_file(value)), "")


def guess_label(names: Iterable[str], value_of: Callable[[str], object]) -> str:
    """Return the first usual name whose value in the first record is a class number or -1, "" for none."""
    values = ((name, value_of(name)) for name in find_known_names(names, LABEL_NAMES))
    numbers = range(UNLABELLED, MAX_CLASSES)
    return next((name for name, value in values if type(value) is int and value in numbers), "")


def label_note(schema: Schema, entries: Entries, options: SourceOptions) -> tuple[str, ...]:
    """Return a note on the column that may be the label, if no record has one and the user named none."""
    if options.label_column is not None or (entries["label"] != UNLABELLED).any():
        return ()
    names = [field.name.rstrip("_") for field in schema if field.kind != "image"]
    likely = find_known_names(names, LABEL_NAMES)[:1]
    return tuple(f"no record has a label; if it is {name}, add --label-column {name}" for name in likely)


def resolve_name(names: Iterable[str], wanted: str, option: str) -> str:
    """Return the file's name for the user's, which may be a column's; "" for "". Raises UsageError."""
    names = list(names)
    for name in names if wanted else ("",):
        if wanted in (name, column_name(name)):
            return name
    available = ", ".join(names)[:200] or "none"
    raise UsageError(f"no record has a column {wanted!r}; name it with {option}, one of: {available}")
