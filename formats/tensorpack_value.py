"""One value of tensorpack's LMDB: plain data, in which byte strings are located and not read."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, TypeAlias

from .archive_file import ReadAt

_PIECE = 512  # before the elements of an array there are up to 200 bytes, and as many behind them
_LONGEST_NAME = 128
_NUMBERS = re.compile(r"[|<>][biufc](1|2|4|8|16)", re.ASCII)


@dataclass(slots=True)
class Stretch:
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
    """A numpy array of plain numbers; a numpy scalar where ``shape`` is empty."""

    dtype: str
    shape: tuple[int, ...]
    data: Stretch

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raises ValueError for other dtypes, objects among them, and where shape and bytes do not fit."""
        match = _NUMBERS.fullmatch(self.dtype)
        if match is None:
            raise ValueError(f"it holds an array of dtype {self.dtype!r}: only plain numbers are read")
        if any(type(n) is not int or n < 0 for n in self.shape):
            raise ValueError("it holds an array of a shape that cannot be")
        if math.prod(self.shape) * int(match[1]) != self.data.length:
            raise ValueError(f"it holds an array whose shape does not fit its {self.data.length} bytes")


Plain: TypeAlias = bool | int | float | Text | Stretch | Array | list[Any] | tuple[Any, ...] | None
"""All that a value can be made of."""


class Value:
    """The ``length`` bytes at ``offset`` of a file, read only where and when they are asked for.

    ``piece`` is how many bytes are read at once. Not thread-safe.
    """

    def __init__(self, read_at: ReadAt, offset: int, length: int, *, piece: int = _PIECE) -> None:
        self.offset, self.length = offset, length
        self._read_at, self._most = read_at, piece
        self._start, self._piece = 0, b""

    def in_pieces_of(self, piece: int) -> Value:
        """The same value, read otherwise."""
        return Value(self._read_at, self.offset, self.length, piece=piece)

    def read(self, start: int, length: int) -> bytes:
        """Exactly these bytes. Raises ValueError where there are not so many; OSError."""
        at = start - self._start
        if at < 0 or at + length > len(self._piece):
            self._fetch(start, length)
            at = 0
        return self._piece[at : at + length]

    def byte(self, start: int) -> int:
        """One byte, for readers that go from one to the next."""
        at = start - self._start
        return self._piece[at] if 0 <= at < len(self._piece) else self.read(start, 1)[0]

    def _fetch(self, start: int, length: int) -> None:
        wanted = min(max(length, self._most), self.length - start)
        if wanted < length:
            raise ValueError("it is cut off")
        self._start, self._piece = start, self._read_at(wanted, self.offset + start)
        if len(self._piece) < wanted:
            raise ValueError("the file ends within it")

    def bytes_of(self, stretch: Stretch) -> bytes:
        """The bytes themselves."""
        if not stretch.latin1:
            return self.read(stretch.start, stretch.length)
        stored = min(2 * stretch.length, self.length - stretch.start)
        return from_latin1(self.read(stretch.start, stored), stretch.length)

    def name(self, item: object) -> str:
        """Short ASCII: text, or the byte string that Python 2 had for it. Raises ValueError for all else."""
        if not isinstance(item, Text | Stretch) or item.length > _LONGEST_NAME:
            raise ValueError("it has something else where a name should be")
        return self.read(item.start, item.length).decode("ascii")


def from_latin1(stored: bytes, length: int) -> bytes:
    """The ``length`` bytes that were stored as the UTF-8 of as many characters; the rest is ignored."""
    return stored.decode(errors="replace")[:length].encode("latin-1")


def kind_of(item: object) -> str:
    """What an item is, in words for people."""
    match item:
        case Array(dtype, ()):
            return f"a number of dtype {dtype}"
        case Array(dtype, shape):
            return f"an array of dtype {dtype} and shape {shape}"
        case Stretch():
            return f"{item.length} bytes"
        case Text():
            return "text"
        case list() | tuple():
            return f"a {type(item).__name__} of {len(item)}"
        case None | bool():
            return str(item)
        case int() | float():
            return f"a number ({type(item).__name__})"
    return "a name of numpy's"
