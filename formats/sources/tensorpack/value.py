"""A value of tensorpack's LMDB: plain data, with byte strings located and not read."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from shardprep.formats.system.regular_file import ReadAt

_PIECE = 512  # up to 200 bytes come before the elements of an array, and as many after them
_LONGEST_NAME = 128
_MOST_DIMENSIONS = 64  # numpy 2's limit
_NUMBERS = re.compile(r"[|<>][biufc](1|2|4|8|16)", re.ASCII)


@dataclass(slots=True)
class ByteRange:
    """``length`` bytes at ``start`` of a value; if ``latin1``, stored as the UTF-8 of as many characters."""

    start: int
    length: int
    latin1: bool = False


@dataclass(slots=True)
class Text:
    """Text: ``length`` bytes of UTF-8 at ``start`` of a value."""

    start: int
    length: int


@dataclass(slots=True)
class Array:
    """A numpy array of plain numbers, or a scalar if ``shape`` is empty. Integers have at most 16 bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: ByteRange

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raise ValueError for other dtypes, such as objects, and if shape and bytes do not fit."""
        match = _NUMBERS.fullmatch(self.dtype)
        if match is None:
            raise ValueError(f"it holds an array of dtype {self.dtype!r}: only plain numbers are read")
        if len(self.shape) > _MOST_DIMENSIONS or any(type(n) is not int or n < 0 for n in self.shape):
            raise ValueError("it holds an array of an impossible shape")
        if math.prod(self.shape) * int(match[1]) != self.data.length:
            raise ValueError(f"it holds an array with a shape that does not fit its {self.data.length} bytes")


NewList = Callable[[], Any]
"""Makes a replacement for a list, with ``extend``, and with a type of its own or ``list``."""

Element = Callable[[Any], Any]
"""Converts an item that is put into a list. Raises ValueError for an item that must not be there."""


def unchanged(item: Any) -> Any:
    """Return an item unchanged: the default :data:`Element`."""
    return item


Plain: TypeAlias = (
    bool | int | float | Text | ByteRange | Array | list[Any] | tuple[Any, ...] | dict[str, Any] | None
)
"""The types that a value can have."""


class Value:
    """The ``length`` bytes at ``offset`` of a file, read on demand.

    ``piece`` is the number of bytes that are read at once. Not thread-safe.
    """

    def __init__(self, read_at: ReadAt, offset: int, length: int, *, piece: int = _PIECE) -> None:
        self.offset, self.length = offset, length
        self._read_at, self._most = read_at, piece
        self._start, self._piece = 0, b""

    def in_pieces_of(self, piece: int) -> Value:
        """Return the same value, read in pieces of another size."""
        return Value(self._read_at, self.offset, self.length, piece=piece)

    def read(self, start: int, length: int) -> bytes:
        """Return exactly these bytes. Raises ValueError if there are not as many; OSError."""
        at = start - self._start
        if at < 0 or at + length > len(self._piece):
            self._fetch(start, length)
            at = 0
        return self._piece[at : at + length]

    def byte(self, start: int) -> int:
        """Return one byte, for readers that go from one to the next."""
        at = start - self._start
        return self._piece[at] if 0 <= at < len(self._piece) else self.read(start, 1)[0]

    def _fetch(self, start: int, length: int) -> None:
        wanted = min(max(length, self._most), self.length - start)
        if wanted < length:
            raise ValueError("it is cut off")
        self._start, self._piece = start, self._read_at(wanted, self.offset + start)
        if len(self._piece) < wanted:
            raise ValueError("the file ends within it")

    def bytes_of(self, stretch: ByteRange) -> bytes:
        """Return the bytes of a range."""
        if not stretch.latin1:
            return self.read(stretch.start, stretch.length)
        stored = min(2 * stretch.length, self.length - stretch.start)
        return from_latin1(self.read(stretch.start, stored), stretch.length)

    def name(self, item: object) -> str:
        """Return short ASCII text, or Python 2's byte string of it. Raises ValueError for anything else."""
        if not isinstance(item, Text | ByteRange) or item.length > _LONGEST_NAME:
            raise ValueError("it has something else where a name should be")
        return self.read(item.start, item.length).decode("ascii")


def from_latin1(stored: bytes, length: int) -> bytes:
    """Return the ``length`` bytes stored as the UTF-8 of as many characters; the rest is ignored."""
    return stored.decode(errors="replace")[:length].encode("latin-1")


def kind_of(item: object) -> str:
    """Return a description of an item for messages."""
    match item:
        case Array(dtype, ()):
            return f"a number of dtype {dtype}"
        case Array(dtype, shape):
            return f"an array of dtype {dtype} and shape {shape}"
        case ByteRange():
            return f"{item.length} bytes"
        case Text():
            return "text"
        case list() | tuple() | array():
            return f"a {type(item).__name__} of {len(item)}"
        case dict():
            return f"a dict of {', '.join(item)}"
        case None | bool():
            return str(item)
        case int() | float():
            return f"a number ({type(item).__name__})"
    return "a name of numpy's"
