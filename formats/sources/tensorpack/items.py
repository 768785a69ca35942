"""Datapoints of any plain data: lists and dicts of arrays, bytes, text and numbers, which become columns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardprep.formats.columns.codec import BadValue
from shardprep.formats.columns.found_schema import FIRST_ITEMS, found_schema
from shardprep.formats.columns.item_form import ItemForm
from shardprep.formats.columns.schema import Schema
from shardprep.formats.errors import UsageError
from shardprep.formats.records.labels import UNLABELLED
from shardprep.formats.sources.tar.reader import TarReader

from .datapoint import MAX_LABELS, MOST_BYTES, Decode
from .value import Array, ByteRange, Text, Value, kind_of

_MOST_PARTS = 1 << 12
_MOST_DEPTH = 8


def read_item(value: Value, decode: Decode) -> Any:
    """Return a datapoint with the bytes of its arrays. Raises ValueError for more than plain data."""
    if value.length > MOST_BYTES:
        raise ValueError(f"it has {value.length} bytes, more than a value may have")
    found = decode(value, most=_MOST_PARTS, dicts=True)
    if not isinstance(found, list | tuple | dict) or not found:
        raise ValueError(f"it is {kind_of(found)}, and no list or dict of components")
    return _Materials(value).of(found)


class _Materials:
    """The contents of located parts, bounded: a part may be there many times, and within itself."""

    def __init__(self, value: Value) -> None:
        self._value = value
        self._parts, self._bytes = _MOST_PARTS, 2 * value.length

    def of(self, item: Any, depth: int = 0) -> Any:
        self._parts -= 1
        if self._parts < 0 or depth > _MOST_DEPTH:
            raise ValueError(f"it has more than {_MOST_PARTS} parts, or more than {_MOST_DEPTH} levels")
        match item:
            case ByteRange():
                return self._taken(item)
            case Text(start, length):
                return self._taken(ByteRange(start, length)).decode()
            case Array(dtype, shape, data):
                return self._array(dtype, shape, self._taken(data))
            case dict():
                return {name: self.of(each, depth + 1) for name, each in item.items()}
            case list() | tuple():
                return type(item)([self.of(each, depth + 1) for each in item])
            case None | bool() | int() | float():
                return item
        raise ValueError(f"it holds {kind_of(item)}")

    def _taken(self, place: ByteRange) -> bytes:
        self._bytes -= place.length
        if self._bytes < 0:
            raise ValueError("its components have more bytes than it has")
        return self._value.bytes_of(place)

    def _array(self, dtype: str, shape: tuple[int, ...], data: bytes) -> Any:
        array = np.frombuffer(data, np.dtype(dtype), math.prod(shape)).reshape(shape)
        array = array.astype(array.dtype.newbyteorder("="), copy=False)
        return array if shape else array[()]


@dataclass
class ItemContents:
    """The datapoints of a file as read so far: their form, and the first of them."""

    form: ItemForm
    first: list[Mapping[str, Any]] = field(default_factory=list)

    def label(self, item: Any) -> int:
        """Note a datapoint, and return its label. Raises ValueError for one of another form."""
        try:
            parts = self.form.parts(item)
        except BadValue as error:
            raise ValueError(f"it {error.message}") from error
        if len(self.first) < FIRST_ITEMS:
            self.first.append({name: parts[name] for name in self.form.columns})
        label = parts["label"] if "label" in self.form.own else UNLABELLED
        if isinstance(label, bool) or not isinstance(label, int | np.integer) or not -1 <= label < MAX_LABELS:
            raise ValueError(f"its label is {label!r}, and labels are -1 to {MAX_LABELS - 1} here")
        return int(label)

    @property
    def schema(self) -> Schema:
        """The schema of the first datapoints. Raises ValueError for values that no column can hold."""
        try:
            return found_schema(self.first, self.form.columns)
        except (BadValue, UsageError) as error:
            raise ValueError(
                f"its first {len(self.first)} records make no columns: {error.message}"
            ) from error


def begun_items(item: Any) -> ItemContents:
    """Return the contents of a file with this first datapoint. Raises ValueError for names of no columns."""
    form = ItemForm.of(item)
    if "key" in form.own:
        raise ValueError("it has a component key, which is the name of the record's own key")
    return ItemContents(form)


@dataclass
class ItemReader(TarReader):
    """Reader of datapoints; an entry's offset and length are those of its value."""

    decode: Decode | None = None
    form: ItemForm = field(default_factory=lambda: ItemForm("list", ()))
    schema: Schema = field(default_factory=Schema)
    _last: tuple[int, Mapping[str, Any]] = field(default=(-1, {}), init=False, repr=False, compare=False)

    def read(self, entry: np.void) -> bytes:
        image = self._parts(entry).get("image", b"") if "image" in self.form.own else b""
        if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 1:
            return image.tobytes()
        if not isinstance(image, bytes):
            raise BadValue("has an image that is neither bytes nor a line of uint8")
        return image

    def values(self, entry: np.void) -> tuple[bytes, ...]:
        parts = self._parts(entry)
        return tuple(each.codec.encode(parts[each.name]) for each in self.schema)

    def _parts(self, entry: np.void) -> Mapping[str, Any]:
        if self._file is None or self.decode is None:
            raise ValueError("the reader is closed")
        place = int(entry["offset"])
        if self._last[0] != place:
            value = Value(self._file.read_at, place, int(entry["length"]))
            try:
                self._last = place, self.form.parts(read_item(value, self.decode))
            except ValueError as error:
                raise BadValue(f"cannot be read: {error}") from error
        return self._last[1]
