"""Codecs of column values: numbers, text, bytes, JSON and arrays."""

from __future__ import annotations

import json
import math
import operator
import re
import struct
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, SupportsIndex, TypeGuard

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import BadImage, DataError, printable
from shardprep.formats.images.header import read_image_header
from shardprep.formats.runtime.files import cached_property

MAX_VALUE_BYTES = 64 << 20  # the limit of an image


class BadValue(DataError):
    """A value that the column's kind cannot hold; ``key`` is the record's."""


class Codec(ABC):
    """Encodes the values of one kind of column.

    Equal values give equal bytes, and ``decode(encode(value))`` equals ``value`` in type, shape and content.
    Pure, thread-safe and picklable.
    """

    dtype: np.dtype[Any] | None = None
    """The dtype of a value in a table; None if sizes vary."""

    @property
    def size(self) -> int | None:
        """The number of bytes of every value; None if it varies."""
        return None if self.dtype is None else self.dtype.itemsize

    @abstractmethod
    def encode(self, value: Any) -> bytes:
        """Return the bytes of a value. Raises BadValue if the column cannot hold it."""

    @abstractmethod
    def decode(self, data: bytes) -> Any:
        """Return the value of encoded bytes. Raises BadValue for any others."""

    def are_valid(self, values: npt.NDArray[Any]) -> bool:
        """Whether :meth:`decode` takes the bytes of all these values of :attr:`dtype`."""
        return True


def is_masked(value: object) -> bool:
    """Whether the value is a masked array. ``numpy.ma`` is imported for arrays of subclasses only."""
    is_subclass = isinstance(value, np.ndarray) and type(value) is not np.ndarray
    return is_subclass and isinstance(value, np.ma.MaskedArray)


def refuse_masked(value: object) -> None:
    """Raise BadValue for a masked array, which would lose its mask."""
    if is_masked(value):
        raise BadValue(
            "has a masked array, which would lose its mask: give filled(value), and np.ma.getmaskarray() as "
            "another part"
        )


def refused(value: object, expected: str) -> BadValue:
    """Return the error for a value of the wrong kind."""
    shape = f" of shape {value.shape} and dtype {value.dtype}" if isinstance(value, np.ndarray) else ""
    text = "" if isinstance(value, np.ndarray | bytes) else f" {printable(repr(value)[:80])}"
    return BadValue(f"expected {expected}, not {type(value).__name__}{text}{shape}")


def bounded(data: bytes) -> bytes:
    """Return the data of a value. Raises BadValue if it has more than MAX_VALUE_BYTES."""
    if len(data) > MAX_VALUE_BYTES:
        raise BadValue(f"has {len(data)} bytes; a value has at most {MAX_VALUE_BYTES}")
    return data


INT64 = np.iinfo(np.int64)
LABEL = np.dtype("<i4")


class IntegerCodec(Codec):
    """Integers of 64 bits; NumPy integers come back as Python's."""

    dtype = np.dtype("<i8")

    def encode(self, value: Any) -> bytes:
        if not is_whole(value):
            raise refused(value, "an integer")
        number = operator.index(value)
        if not INT64.min <= number <= INT64.max:
            raise refused(value, "an integer of 64 bits")
        return number.to_bytes(8, "little", signed=True)

    def decode(self, data: bytes) -> int:
        return int.from_bytes(_sized(data, 8), "little", signed=True)


class FloatCodec(Codec):
    """Floats of 64 bits, including NaN and infinities; integers are accepted, too."""

    dtype = np.dtype("<f8")

    def encode(self, value: Any) -> bytes:
        if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
            raise refused(value, "a number")
        try:
            return struct.pack("<d", float(value))
        except OverflowError as error:
            raise refused(value, "a number that a float can hold") from error

    def decode(self, data: bytes) -> float:
        return float(np.frombuffer(_sized(data, 8), "<f8")[0])


@dataclass(frozen=True)
class LabelCodec(Codec):
    """One of ``classes``, given by name or number, or -1 for none; decoded to its number."""

    classes: tuple[str, ...]
    dtype = LABEL

    def encode(self, value: Any) -> bytes:
        return number_of(value, self.classes, least=-1).to_bytes(4, "little", signed=True)

    def decode(self, data: bytes) -> int:
        label = int.from_bytes(_sized(data, 4), "little", signed=True)
        if not -1 <= label < len(self.classes):
            raise BadValue(f"has the label {label}, but there are {len(self.classes)} classes")
        return label

    def are_valid(self, values: npt.NDArray[Any]) -> bool:
        return bool(((values >= -1) & (values < len(self.classes))).all())


@dataclass(frozen=True)
class LabelsCodec(Codec):
    """Any of ``classes``, each at most once, given by name or number; decoded to ascending int32 [n]."""

    classes: tuple[str, ...]

    def encode(self, value: Any) -> bytes:
        if isinstance(value, str | bytes | dict):
            raise refused(value, "several labels")
        try:
            numbers = sorted(number_of(each, self.classes) for each in value)
        except TypeError as error:
            raise refused(value, "several labels") from error
        if len(set(numbers)) != len(numbers):
            raise refused(value, "labels that differ")
        return bounded(np.array(numbers, LABEL).tobytes())

    def decode(self, data: bytes) -> npt.NDArray[np.int32]:
        if len(data) % LABEL.itemsize:
            raise BadValue(f"has {len(data)} bytes, which are not labels")
        labels = np.frombuffer(data, LABEL)
        if len(labels) and (labels[0] < 0 or labels[-1] >= len(self.classes) or (np.diff(labels) <= 0).any()):
            raise BadValue(f"does not have ascending labels of {len(self.classes)} classes")
        return labels


def number_of(value: object, classes: tuple[str, ...], *, least: int = 0) -> int:
    """Return the number of a class given by name or number. Raises BadValue for an unknown one."""
    if isinstance(value, str):
        try:
            return classes.index(value)
        except ValueError as error:
            raise refused(value, f"one of {len(classes)} classes") from error
    if not is_whole(value):
        raise refused(value, "a label")
    number = operator.index(value)
    if not least <= number < len(classes):
        raise refused(value, f"a label below {len(classes)}")
    return number


def is_whole(value: object) -> TypeGuard[SupportsIndex]:
    """Whether the value is a Python or NumPy integer, and not a bool."""
    if type(value) is int:  # a shortcut: SupportsIndex takes 10 us
        return True
    return not isinstance(value, bool | np.bool_) and isinstance(value, SupportsIndex)


def _sized(data: bytes, size: int) -> bytes:
    if len(data) != size:
        raise BadValue(f"has {len(data)} bytes, not {size}")
    return data


class BytesCodec(Codec):
    """Any bytes, unchanged."""

    def encode(self, value: Any) -> bytes:
        if not isinstance(value, bytes | bytearray | memoryview):
            raise refused(value, "bytes")
        return bounded(bytes(value))

    def decode(self, data: bytes) -> bytes:
        return data


class ImageCodec(BytesCodec):
    """Image files, unchanged, with their headers checked."""

    def encode(self, value: Any) -> bytes:
        data = super().encode(value)
        try:
            read_image_header(data)
        except BadImage as error:
            raise BadValue(error.message) from error
        return data


class TextCodec(Codec):
    """Text as UTF-8."""

    def encode(self, value: Any) -> bytes:
        if not isinstance(value, str):
            raise refused(value, "text")
        try:
            return bounded(value.encode())
        except UnicodeEncodeError as error:
            raise BadValue("is not Unicode text: it has surrogates") from error

    def decode(self, data: bytes) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise BadValue("is not UTF-8") from error


class JsonCodec(Codec):
    """JSON values: None, booleans, numbers, text, lists, and dicts with text as keys.

    Dicts keep their order. NaN, infinities, tuples and other objects are refused, as they would not come back
    unchanged.
    """

    def encode(self, value: Any) -> bytes:
        _check(value)
        try:
            text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
            return bounded(text.encode())
        except (ValueError, RecursionError) as error:
            raise BadValue(f"is not JSON: {error}") from error

    def decode(self, data: bytes) -> Any:
        try:
            return json.loads(data.decode(), parse_constant=no_constant)
        except (ValueError, RecursionError) as error:
            raise BadValue(f"is not JSON: {error}") from error


def _check(value: object) -> None:
    """Raise BadValue for a value that JSON would change, such as a tuple into a list."""
    pending = [value]
    while pending:
        item = pending.pop()
        if type(item) is dict:
            if not all(type(name) is str for name in item):
                raise refused(item, "a dict with text as keys")
            pending.extend(item.values())
        elif type(item) is list:
            pending.extend(item)
        elif item is not None and type(item) not in (bool, int, float, str):
            raise refused(item, "a value of JSON")


def no_constant(name: str) -> None:
    """Raise ValueError for NaN or an infinity, as the ``parse_constant`` of a JSON decoder."""
    raise ValueError(f"{name} is not JSON")


DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
)  # fmt: skip
MAX_DIMENSIONS = 8
FREE = "*"
SIZE = np.dtype("<u4")  # of a free dimension, before the array's bytes


@dataclass(frozen=True)
class ArrayCodec(Codec):
    """Arrays of ``element``, one of DTYPES; None in ``shape`` is a dimension of any size.

    The bytes are the sizes of the free dimensions (u32), then the elements in C order, all little-endian.
    Decoded arrays are read-only; without dimensions they are NumPy scalars.
    """

    element: str
    shape: tuple[int | None, ...]

    @classmethod
    def of(cls, kind: str) -> ArrayCodec | None:
        """Return the codec of a kind such as ``float32[*,4]``; None if it is not an array."""
        found = re.fullmatch(r"(\w+)\[([^\[\]]*)\]", kind)
        if found is None or found[1] not in DTYPES:
            return None
        sizes = [size.strip() for size in found[2].split(",")] if found[2].strip() else []
        if len(sizes) > MAX_DIMENSIONS or not all(re.fullmatch(r"\*|[0-9]{1,9}", size) for size in sizes):
            return None
        shape = tuple(None if size == FREE else int(size) for size in sizes)
        codec = cls(found[1], shape)
        fixed = math.prod(size for size in shape if size is not None) * codec.elements.itemsize
        return codec if fixed <= MAX_VALUE_BYTES else None

    @property
    def kind(self) -> str:
        """The text that :meth:`of` parses to this codec."""
        sizes = (FREE if size is None else str(size) for size in self.shape)
        return f"{self.element}[{','.join(sizes)}]"

    @cached_property
    def elements(self) -> np.dtype[Any]:
        return np.dtype(self.element).newbyteorder("<")

    @cached_property
    def dtype(self) -> np.dtype[Any] | None:
        return None if None in self.shape else np.dtype((self.elements, self.shape))

    def encode(self, value: Any) -> bytes:
        is_array = isinstance(value, np.ndarray | np.generic) and value.dtype == self.elements
        if not is_array or len(value.shape) != len(self.shape):
            raise refused(value, self.kind)
        sizes = list(zip(value.shape, self.shape, strict=True))
        if not all(fixed in (None, size) for size, fixed in sizes):
            raise refused(value, self.kind)
        free = [size for size, fixed in sizes if fixed is None]
        return bounded(np.array(free, SIZE).tobytes() + np.ascontiguousarray(value).tobytes())

    def decode(self, data: bytes) -> npt.NDArray[Any]:
        dimensions = self.shape.count(None)
        start = dimensions * SIZE.itemsize
        if len(data) >= start:
            free = iter(np.frombuffer(data, SIZE, dimensions).tolist())
            shape = tuple(next(free) if size is None else size for size in self.shape)
            if len(data) - start == math.prod(shape) * self.elements.itemsize:
                array = np.frombuffer(data, self.elements, math.prod(shape), start).reshape(shape)
                return array if shape else array[()]
        raise BadValue(f"has {len(data)} bytes, which are not {self.kind}")
