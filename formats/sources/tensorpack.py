"""The source of tensorpack's LMDB files: datapoints of images, labels and other plain data.

The file is read without the lmdb library, so it is neither mapped nor locked. Values are read by offset, like
the members of an archive.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import SourceDamaged, UsageError
from shardprep.formats.records.record import ItemForm
from shardprep.formats.records.schema import FIRST_ITEMS, BadValue, Field, Schema, infer_schema
from shardprep.formats.runtime.files import ArchiveFile, Identity, errors_as_damage, name_in_os_errors
from shardprep.formats.shards.lmdb import HEADER, MAGIC, LmdbPages
from shardprep.formats.sources.listing import MAX_CLASSES, Classes
from shardprep.formats.sources.pickled import (
    MAX_LEVELS,
    MAX_PARTS,
    Array,
    ByteRange,
    Text,
    decode_plain,
    from_latin1,
    read_bytes,
)
from shardprep.formats.sources.record_files import (
    ByteWindow,
    FilesReader,
    RecordContents,
    RecordSource,
    SplitFiles,
    guess_image,
    guess_label,
    name_source_in_errors,
    resolve_name,
)
from shardprep.formats.sources.source import ByteReader, Entries, SourceOptions
from shardprep.formats.sources.tar import TarReader

_ADVICE = "write the LMDB again"
KEYS = b"__keys__"
DIGITS = 8
_KEY = re.compile(rb"[0-9]{8}|[1-9][0-9]{8,17}")  # 8 digits, or more from 10**8 on
_DIGITS = re.compile(rb"[0-9]{8,19}")  # of a key, and one more to refuse longer runs
_MAX_BYTES_OF_KEYS = 256 << 20  # 17 million keys
_MAX_REPEATED = 64 << 10  # bytes, such as class names, that a pickle stores once and refers to again


def recognise_tensorpack(path: Path, split: str, options: SourceOptions) -> TensorpackLmdb | None:
    """Return the source of tensorpack's LMDB, as ``split``, else None. Raises UsageError for another LMDB."""
    file = path / "data.mdb" if path.is_dir() else path
    if not file.is_file():
        return None
    with name_in_os_errors(file), file.open("rb") as stream:
        if stream.read(HEADER.size + 4)[HEADER.size :] != MAGIC.to_bytes(4, "little"):
            return None
    with name_source_in_errors(file), errors_as_damage(file, _ADVICE), ArchiveFile(file) as archive:
        archive.expect_random_reads()
        key, value = next(read_records(archive), (b"", ByteWindow.of(b"")))
        if not key:
            raise UsageError("is an LMDB without records; give a complete one")
        if key != KEYS and not _KEY.fullmatch(key):
            raise UsageError(
                f"is an LMDB, but not from tensorpack's LMDBSerializer: its first key is {key[:32]!r}"
            )
        with errors_as_damage(file, _ADVICE, key=key.decode()):
            layout = None if key == KEYS else detect_layout(value, options)
    return TensorpackLmdb(SplitFiles(file.parent, {split: (file.name,)}), options, layout)


def detect_layout(first: ByteWindow, options: SourceOptions) -> ItemLayout | None:
    """Return the layout by the first datapoint; None for [image, label]. Raises ValueError, UsageError."""
    if not options.kept("image_column", "label_column"):
        match decode_plain(first):
            case [ByteRange(), int()]:  # apparently an image and its label; checked later
                return None
        with suppress(ValueError):
            read_datapoint(first)
            return None
    layout = ItemLayout.of(read_item(first), options)
    if "key" in layout.form.own_names:
        raise ValueError("it has a component named key, which is reserved for the record's key")
    return layout


class LmdbContents(RecordContents):
    """The datapoints of a file. Reading stops at data that LMDBSerializer never writes."""

    can_number_keys = False
    identity: Identity

    def __init__(self, source: RecordSource, classes: Classes) -> None:
        super().__init__(source, classes)
        self._as_text: bool | None = None
        self._first_items: list[Mapping[str, Any]] = []
        self._listed_keys: npt.NDArray[np.int64] | None = None

    def read(self, file: ArchiveFile) -> None:
        self.path, self.identity = file.path, file.identity
        with errors_as_damage(file.path, _ADVICE):
            for key, value in read_records(file):
                with errors_as_damage(file.path, _ADVICE, key=key.decode(errors="backslashreplace")):
                    self._add(key, value)

    def _add(self, key: bytes, value: ByteWindow) -> None:
        if key == KEYS:
            self._listed_keys = read_keys(value)
            return
        number = check_key(key)
        if self.layout is not None:
            form = self.layout.form
            try:
                parts = self.layout.parts(read_item(value))
            except BadValue as error:
                raise ValueError(f"it {error.message}") from error
            if len(self._first_items) < FIRST_ITEMS:
                self._first_items.append({name: _empty_like(parts[name]) for name in form.columns})
            label = self.label_of(parts["label"] if "label" in form.own_names else None)
            self.append(number, label, length=value.length, offset=value.start)
            return
        image, label = read_datapoint(value)
        if image.length:
            if self._as_text not in (None, image.latin1):
                raise ValueError("some images are stored as bytes and some as text")
            self._as_text = image.latin1
        self.append(number, self.classes.add_number(label), length=image.length, offset=image.start)

    def columns(self) -> tuple[Schema, bool]:
        if self.layout is None or not self._first_items:
            return Schema(), True
        form = self.layout.form
        self.options = form.to_json()
        try:
            names = [*filter(self.takes, form.columns)]
            return infer_schema(self._first_items, names), "image" in form.own_names
        except (BadValue, UsageError) as error:
            no_columns = f"its first {len(self._first_items)} records make no columns: {error.message}"
            raise self._damage(no_columns) from error

    def _finish_entries(self) -> Entries:
        """Return the entries with zero-padded keys, which sort like numbers; check the file's list."""
        entries, keys = super()._finish_entries(), KEYS.decode()
        if (digits := entries["key"].dtype.itemsize) > DIGITS:
            entries["key"] = np.char.zfill(entries["key"], digits)
        if self._listed_keys is None:
            if not self.problems:  # at which reading stopped
                self.shortfall = f"{keys}, which is written last and lists all records, is missing"
            return entries
        present, listed = entries["key"].astype(np.int64), np.unique(self._listed_keys)
        unlisted, missing = np.setdiff1d(present, listed), np.setdiff1d(listed, present)
        if len(listed) < len(self._listed_keys) or len(unlisted):
            raise self._damage(f"{keys} lists a record twice, or does not list one")
        self.expected = len(listed)
        if len(missing):
            self.shortfall = f"{keys} lists {len(missing)} that were lost, {missing[0]:0{DIGITS}d} first"
        return entries

    def reader(self) -> ByteReader:
        if self.layout is not None:
            return ItemReader(self.top, self.schema, self.layout)
        return (TextReader if self._as_text else TarReader)(self.path, self.identity)

    def _damage(self, reason: str) -> SourceDamaged:
        return SourceDamaged(f"{reason}; {_ADVICE}", path=self.path)


@dataclass(frozen=True)
class TensorpackLmdb(RecordSource):
    """An LMDB of tensorpack whose datapoints are [image, label], or any plain data, which become columns.

    Classes are named after their labels, such as ``00042``, so labels stay the same. Keys are those of the
    file, zero-padded to the same number of digits.
    """

    LAYOUT = "tensorpack-lmdb"
    CONTENTS = LmdbContents


def read_datapoint(value: ByteWindow) -> tuple[ByteRange, int]:
    """Return the place of a datapoint's encoded image, and its label. Raises ValueError for anything else."""
    match decode_plain(value):
        case [ByteRange() as image, label] | [Array(dtype="|u1", shape=(_,), data=image), label]:
            pass
        case _:
            raise ValueError("it is not [image, label], with the image encoded, as bytes or a line of uint8")
    if isinstance(label, Array) and label.shape == () and label.dtype[1] in "iu":
        label = int(np.frombuffer(read_bytes(value, label.data), label.dtype)[0])
    if type(label) is not int or not 0 <= label < MAX_CLASSES:
        raise ValueError(f"it is not [image, label], with an integer from 0 to {MAX_CLASSES - 1} as label")
    return image, label


def check_key(key: bytes) -> str:
    """Return the key as text. Raises ValueError if it is not a key of LMDBSerializer."""
    if not _KEY.fullmatch(key):
        raise ValueError(f"its key is not a number of at least {DIGITS} digits")
    return key.decode()


def read_keys(value: ByteWindow) -> npt.NDArray[np.int64]:
    """Return the numbers in ``__keys__``, the only long runs of digits there. Raises ValueError."""
    if value.length > _MAX_BYTES_OF_KEYS:
        raise ValueError(f"it has {value.length} bytes, too many for a list of keys")
    keys = (check_key(digits[0]) for digits in _DIGITS.finditer(value.take(value.start, value.end)))
    return np.fromiter(map(int, keys), np.int64)


def read_item(value: ByteWindow) -> Any:
    """Read a datapoint with its bytes and arrays, with bounds: parts may be repeated, or contain themselves.

    Raises ValueError for more than plain data.
    """
    located = decode_plain(value)
    if not isinstance(located, list | tuple | dict) or not located:
        raise ValueError("it is not a list or dict of components")
    parts_left, bytes_left = MAX_PARTS, 2 * value.length + _MAX_REPEATED

    def take(place: ByteRange) -> bytes:
        nonlocal bytes_left
        bytes_left -= place.length
        if bytes_left < 0:
            raise ValueError("its components have more bytes than the whole record")
        return read_bytes(value, place)

    def read(item: Any, depth: int) -> Any:
        nonlocal parts_left
        parts_left -= 1
        if parts_left < 0 or depth > MAX_LEVELS:
            raise ValueError(f"it has more than {MAX_PARTS} parts, or more than {MAX_LEVELS} levels")
        match item:
            case ByteRange():
                return take(item)
            case Text(start, length):
                return take(ByteRange(start, length)).decode()
            case Array(dtype, shape, data, axes):
                array = np.frombuffer(take(data), np.dtype(dtype), math.prod(shape)).reshape(shape)
                array = array.transpose(axes) if axes else array
                array = array.astype(array.dtype.newbyteorder("="), copy=False)
                return array if shape else array[()]
            case dict():
                return {name: read(each, depth + 1) for name, each in item.items()}
            case list() | tuple():
                return type(item)([read(each, depth + 1) for each in item])
            case None | bool() | int() | float():
                return item
        raise ValueError("it holds more than plain data")

    return read(located, 0)


@dataclass(frozen=True)
class ItemLayout:
    """The components of image and label, and the form of all datapoints after these are renamed.

    A component is "" if there is none, and None if it is named image or label.
    """

    image: str | None
    label: str | None
    form: ItemForm

    @classmethod
    def of(cls, first: Any, options: SourceOptions) -> ItemLayout:
        """Return the layout of the first datapoint. Raises UsageError for options that it lacks."""
        parts = _components_of(first)
        image, label = options.image_column, options.label_column
        if image is not None:
            image = resolve_name(parts, image, "--image-column")
        elif isinstance(first, dict) and "image" not in first:
            image = guess_image(parts, lambda name: _image_bytes(parts[name])) or None
        if label is not None:
            label = resolve_name(parts, label, "--label-column")
        elif isinstance(first, dict) and "label" not in first:
            plain = {name: int(p) if isinstance(p, np.integer) else p for name, p in parts.items()}
            label = guess_label(plain, plain.get) or None
        return cls(image, label, ItemForm.of(_rename_components(first, image, label)))

    def parts(self, item: Any) -> Mapping[str, Any]:
        """Return the components of a datapoint by name. Raises BadValue for another form."""
        return self.form.parts(_rename_components(item, self.image, self.label))


def _rename_components(item: Any, image: str | None, label: str | None) -> Any:
    """Return a datapoint as a dict with components named image and label."""
    if image is None and label is None:
        return item
    names = {"image": image, "label": label}
    renamed = {name: own for own, name in names.items() if name}
    renamed |= {own: f"{own}_" for own, name in names.items() if name is not None and own not in renamed}
    return {renamed.get(name, name): part for name, part in _components_of(item).items()}


def _empty_like(part: Any) -> Any:
    if isinstance(part, np.ndarray):
        return np.broadcast_to(np.zeros((), part.dtype), part.shape)
    return type(part)() if isinstance(part, bytes | str | list | dict) else part


def _components_of(item: Any) -> dict[str, Any]:
    return item if isinstance(item, dict) else {str(number): part for number, part in enumerate(item)}


def _image_bytes(part: Any) -> Any:
    is_line = isinstance(part, np.ndarray) and part.dtype == np.uint8 and part.ndim == 1
    return part.tobytes() if is_line else part


class ItemReader(FilesReader):
    """Reader of datapoints, whose values have the entries' offsets and lengths."""

    def read(self, entry: np.void) -> bytes:
        image = _image_bytes(self.record(entry)["image"]) if "image" in self.layout.form.own_names else b""
        if not isinstance(image, bytes):
            raise BadValue(
                "its image is not encoded, as bytes or a one-dimensional uint8 array; without --image-column, "
                "pixels become a column"
            )
        return image

    def read_record(self, file: ArchiveFile, entry: np.void) -> Mapping[str, Any]:
        start = int(entry["offset"])
        with errors_as_damage(self.location_of(entry), _ADVICE, key=entry["key"].decode()):
            parts: Mapping[str, Any] = self.layout.parts(
                read_item(ByteWindow(file.read_at, start, start + int(entry["length"])))
            )
        return parts

    def value(self, column: Field, record: Mapping[str, Any], entry: np.void) -> Any:
        return record[column.name]


def read_records(file: ArchiveFile) -> Iterator[tuple[bytes, ByteWindow]]:
    """Yield each key in order with its value. Raises SourceDamaged, also for named databases."""

    def damaged(reason: str) -> SourceDamaged:
        return SourceDamaged(f"the LMDB is damaged: {reason}; copy it again", path=file.path)

    pages = LmdbPages(file.read_at, file.end, damaged)
    count, last, size = 0, b"", 0
    for key, node in pages.records():
        start, length, _ = pages.value(node)
        count, size = count + 1, size + length
        if key <= last or size > file.end:
            raise damaged("its keys are not in order, or its records share their bytes")
        last = key
        yield key, ByteWindow(file.read_at, start, start + length)
    if count != pages.meta.entries:
        raise damaged(f"it has {count} records, but says that it has {pages.meta.entries}")


class TextReader(TarReader):
    """Reader of images whose bytes are each stored as a character of UTF-8; lengths are the images'."""

    def read(self, entry: np.void) -> bytes:
        length = int(entry["length"])
        with errors_as_damage(
            self.location_of(entry), "copy it again", place=lambda: "is not bytes stored as text: "
        ):
            return from_latin1(self.resource.read_at(2 * length, int(entry["offset"])), length)
