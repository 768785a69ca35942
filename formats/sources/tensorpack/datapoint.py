"""The values of tensorpack's LMDBSerializer: datapoints ``[image, label]``, and the list of their keys."""

from __future__ import annotations

import re
from array import array
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from shardprep.formats.records.record import MAX_IMAGE_BYTES

from . import msgpack_reader, pickle_reader
from .value import (
    Array,
    ByteRange,
    Element,
    NewList,
    Value,
    kind_of,
    unchanged,
)

KEYS = b"__keys__"
DIGITS = 8
MAX_LABELS = 100_000

_KEY = re.compile(rb"[0-9]{8}|[1-9][0-9]{8,17}")
_ARROW = re.compile(rb"(?:[\0-\x08]\0\0\0){2}")  # the numbers of tensors and arrays
MOST_BYTES = 2 * MAX_IMAGE_BYTES + 4096  # protocol 2 stores most bytes as two
_MOST_PARTS = 256  # opcodes or items; the longest pickle of an array and a numpy scalar has 105
_MOST_BYTES_OF_KEYS = 256 << 20  # 17 million keys
_LEAST_BYTES_OF_A_PART = 3  # on average over a list of keys, which is all that this bounds
_PIECE_OF_KEYS = 1 << 20


class Decode(Protocol):
    """A reader of values of one serializer. Raises ValueError for damage, and for more than plain data."""

    def __call__(
        self,
        value: Value,
        *,
        most: int,
        new_list: NewList = list,
        element: Element = unchanged,
        dicts: bool = False,
    ) -> Any: ...


class Datapoint(NamedTuple):
    """The place of an image within its value, and its label."""

    image: ByteRange
    label: int


def decoder_of(value: Value) -> Decode:
    """Return the reader of this value. Raises ValueError if no serializer of tensorpack wrote it."""
    head = value.read(0, min(8, value.length))
    if head.startswith(pickle_reader.FIRST_BYTES):
        return pickle_reader.unpickle
    if head.startswith(msgpack_reader.FIRST_BYTES):
        return msgpack_reader.unpack
    if _ARROW.fullmatch(head):
        raise ValueError(
            "it was serialized by pyarrow, in a format that pyarrow gave up; load it with the pyarrow of its "
            "time, set TENSORPACK_SERIALIZE=pickle"
        )
    raise ValueError(f"it is neither a pickle of protocol 2 to 5 nor msgpack (starts with {head.hex(' ')})")


def read_datapoint(value: Value, decode: Decode) -> Datapoint:
    """Read a datapoint. Raises ValueError for anything but an encoded image and its label."""
    if value.length > MOST_BYTES:
        raise ValueError(f"it has {value.length} bytes, more than an image may have")
    found = decode(value, most=_MOST_PARTS)
    match found:
        case [image, label]:
            return Datapoint(_image(image), _label(value, label))
    raise ValueError(f"it is {kind_of(found)}, and not [image, label]")


def is_pair(value: Value, decode: Decode) -> bool:
    """Whether a datapoint is some bytes and an integer, though perhaps no image with its label."""
    try:
        found = decode(value, most=_MOST_PARTS)
    except ValueError:
        return False
    match found:
        case [ByteRange(), int()]:
            return True
    return False


def _image(item: object) -> ByteRange:
    match item:
        case ByteRange():
            return item
        case Array(dtype="|u1", shape=(_,), data=data):
            return data
        case Array(shape=(_, _, *_)):
            raise ValueError(f"its image is decoded: {kind_of(item)}; only encoded images are read")
    raise ValueError(f"its image is {kind_of(item)}, and neither bytes nor a line of uint8")


def _label(value: Value, item: object) -> int:
    match item:
        case Array(dtype=dtype, shape=(), data=data) if dtype[1] in "iu":
            order: Literal["big", "little"] = "big" if dtype[0] == ">" else "little"
            label = int.from_bytes(value.bytes_of(data), order, signed=dtype[1] == "i")
        case int() if type(item) is int:
            label = item
        case _:
            raise ValueError(f"its label is {kind_of(item)}, and no integer")
    if not 0 <= label < MAX_LABELS:
        raise ValueError(f"its label is {label}, and labels are 0 to {MAX_LABELS - 1} here")
    return label


def is_key(key: bytes) -> bool:
    """Whether LMDBSerializer stores a record under this key: a number of 8 digits, or more from 10**8 on."""
    return _KEY.fullmatch(key) is not None


def check_key(key: bytes) -> str:
    """Return the key as text. Raises ValueError if it is not a key of LMDBSerializer."""
    if not is_key(key):
        raise ValueError(f"its key is no number of {DIGITS} digits or more")
    return key.decode()


def read_keys(value: Value, decode: Decode) -> npt.NDArray[np.int64]:
    """Return the numbers that ``__keys__`` lists, in its order. Raises ValueError if it is no list of keys.

    Takes 8 bytes per key, and 1 MiB.
    """
    if value.length > _MOST_BYTES_OF_KEYS:
        raise ValueError(f"it has {value.length} bytes, more than a list of keys may have")
    value = value.in_pieces_of(_PIECE_OF_KEYS)
    keys = _Keys(value)
    most = value.length // _LEAST_BYTES_OF_A_PART + _MOST_PARTS
    found = decode(value, most=most, new_list=keys.new_list, element=keys.number_of)
    if type(found) is not array:
        raise ValueError(f"it is {kind_of(found)}, and not a list of keys")
    return np.frombuffer(found, np.int64)


class _Keys:
    """Lists of keys as arrays of their numbers."""

    def __init__(self, value: Value) -> None:
        self._value, self._left = value, value.length // DIGITS

    def new_list(self) -> array[int]:
        return array("q")

    def number_of(self, item: object) -> int:
        """Return the number of a key. Raises ValueError for other items, and for more keys than bytes."""
        self._left -= 1
        if type(item) is not ByteRange or self._left < 0:
            raise ValueError(f"it lists {kind_of(item)}, and is not a list of keys")
        return int(check_key(self._value.bytes_of(item)))
