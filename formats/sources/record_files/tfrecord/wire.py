"""The wire format of protocol buffers, with bounded reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardprep.formats.system.regular_file import ReadAt

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
MAX_VARINT = 10  # bytes

_PIECE, _PIECES = 1 << 12, 4  # bytes of a piece, and pieces that are kept
_SIZES = {FIXED64: 8, FIXED32: 4}


class ByteWindow:
    """Bytes that are read in small pieces: what is passed over is not read."""

    def __init__(self, read_at: ReadAt, end: int) -> None:
        self.end = end
        self._read_at = read_at
        self._pieces: list[tuple[int, bytes]] = []

    def take(self, start: int, end: int) -> bytes:
        """Return the bytes between two offsets. Raises ValueError if the file ends before."""
        for at, piece in self._pieces:
            if at <= start and end <= at + len(piece):
                return piece[start - at : end - at]
        piece = self._read_at(min(max(end - start, _PIECE), self.end - start), start)
        if len(piece) < end - start:
            raise ValueError("the file ends within a record")
        self._pieces = [(start, piece), *self._pieces[: _PIECES - 1]]
        return piece[: end - start]


def window_of(data: bytes) -> ByteWindow:
    """Return a window on bytes in memory."""
    return ByteWindow(lambda length, offset: data[offset : offset + length], len(data))


class WireField(NamedTuple):
    """A field of a message: its number, its type on the wire, and the place of its value."""

    number: int
    kind: int
    start: int
    end: int


def parts(window: ByteWindow, start: int, end: int) -> Iterator[WireField]:
    """Yield the fields of the message between two offsets. Raises ValueError for what is none."""
    at = start
    while at < end:
        head = window.take(at, min(at + 2 * MAX_VARINT, end))
        tag, used = varint(head, 0)
        number, kind = tag >> 3, tag & 7
        size, after = _SIZES.get(kind, -1), used
        if kind == LENGTH:
            size, after = varint(head, used)
        elif kind == VARINT:
            size = varint(head, used)[1] - used
        begin = at + after
        if not 0 <= size <= end - begin or not number:
            raise ValueError(f"a field of type {kind} and {size} bytes does not fit into its message")
        at = begin + size
        yield WireField(number, kind, begin, at)


def varint(data: bytes, start: int) -> tuple[int, int]:
    """Return the number at a place, 0 to 2**64 - 1, and the place after it. Raises ValueError."""
    number = 0
    for place, byte in enumerate(data[start : start + MAX_VARINT]):
        number |= (byte & 0x7F) << 7 * place
        if byte < 0x80 and number < 1 << 64:
            return number, start + place + 1
    raise ValueError("a number is cut off, or has more than 64 bits")


def integers(data: bytes) -> npt.NDArray[np.int64]:
    """Return the numbers of a packed field, int64 [n]. Raises ValueError."""
    raw = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(raw < 0x80)
    if len(raw) and (not len(ends) or ends[-1] != len(raw) - 1):
        raise ValueError("a list of numbers is cut off")
    starts = np.concatenate(([0], ends[:-1] + 1)) if len(ends) else ends
    sizes = ends - starts + 1
    if len(sizes) and (sizes.max() > MAX_VARINT or (raw[ends[sizes == MAX_VARINT]] > 1).any()):
        raise ValueError("a number in a list has more than 64 bits")
    found = np.zeros(len(ends), np.uint64)
    for place in range(int(sizes.max(initial=0))):
        longer = sizes > place
        bits = raw[starts[longer] + place].astype(np.uint64) & np.uint64(0x7F)
        found[longer] |= bits << np.uint64(7 * place)
    return found.view(np.int64)
