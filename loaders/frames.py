"""A batch as buffers for a wire: one small header, then the raw bytes of its arrays. docs/frames.md is its format."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt

from ..formats.errors import DataError, UsageError
from .memory import aligned

Buffer = bytes | npt.NDArray[np.uint8]
Memory = Callable[[int], npt.NDArray[np.uint8]]

MAGIC = b"SPBF"
VERSION = 1
HEAD = struct.Struct("<4sBBHQII")
CRC = struct.Struct("<I")
LENGTH = np.dtype("<u8")
DTYPES = frozenset(
    ["|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16"]
)
PIECE = (
    1 << 20
)  # bytes of a buffer: for larger ones libzmq asks the system for memory anew each time, at a quarter of the speed
MAX_PARTS = 4096  # buffers after the header
MAX_DEPTH = 8
MAX_DIMENSIONS = 32
MAX_DESCRIPTION = 1 << 16
MAX_SIZE = (1 << 63) - 1  # what numpy can address
DEFAULT_LIMIT = 256 << 20


class FrameDamaged(DataError):
    """A frame that is not what :func:`pack_batch` or :func:`pack_note` makes: nothing of it can be used."""


class Kind(IntEnum):
    """What a frame says. docs/frames.md and docs/wire.md tell who says what when."""

    DATA = 0
    END = 1
    ERROR = 2
    HELLO = 3
    WELCOME = 4
    CREDIT = 5
    DONE = 6
    STOP = 7
    LEASE = 8


@dataclass(frozen=True)
class Head:
    """A header that was read: ``number`` is the batch's or what the kind counts, ``parts`` the buffers that follow.

    ``description`` is the form of a DATA frame's batch, and short values by name for all others.
    """

    kind: Kind
    number: int
    parts: int
    description: dict[str, Any]


def pack_batch(batch: Any, number: int = 0) -> list[Buffer]:
    """A header and the bytes of each part of ``batch``, which are not copied where they are contiguous already.

    A batch is an array, a list of bytes, or a tuple or dict of such, nested at most MAX_DEPTH deep; a list of
    other things counts as a tuple. Arrays are of booleans, integers, floats or complex numbers. The buffers
    alias the batch: it must stay as it is until they are sent. Raises UsageError for anything else.
    """
    buffers: list[Buffer] = []
    description = _described(batch, buffers, 0)
    return [_head(Kind.DATA, number, description, len(buffers)), *buffers]


def pack_note(kind: Kind, number: int = 0, **notes: str | int) -> list[Buffer]:
    """A frame without arrays."""
    return [_head(kind, number, notes, 0)]


def read_head(part: Any) -> Head:
    """The header in a frame's first buffer. Raises FrameDamaged."""
    data = bytes(memoryview(part)[: HEAD.size + CRC.size + MAX_DESCRIPTION + 1])
    if len(data) < HEAD.size + CRC.size:
        raise FrameDamaged(f"a frame's header of {len(data)} bytes is too short")
    magic, version, kind, zero, number, parts, length = HEAD.unpack_from(data)
    text = data[HEAD.size + CRC.size :]
    if (magic, version, zero, length) != (MAGIC, VERSION, 0, len(text)) or kind >= len(Kind):
        raise FrameDamaged("this is no header of a frame of version 1")
    if google_crc32c.value(data[: HEAD.size] + text) != CRC.unpack_from(data, HEAD.size)[0]:
        raise FrameDamaged("a frame's header does not match its checksum")
    if parts > MAX_PARTS or length > MAX_DESCRIPTION:
        raise FrameDamaged(f"a frame of {parts} parts and a description of {length} bytes is too large")
    return Head(Kind(kind), number, parts, _parsed(text))


def unpack_batch(
    head: Head, parts: Sequence[Any], *, limit_bytes: int = DEFAULT_LIMIT, memory: Memory = aligned
) -> Any:
    """The batch of a DATA frame from the buffers after its header, copied once into ``memory`` (on 64 bytes).

    Lists of bytes come as such, and lists and named tuples as tuples. All lengths, shapes and dtypes are checked
    before anything is allocated, and checksums as the bytes are copied. Raises FrameDamaged where one is wrong, or
    where the buffers have more than ``limit_bytes``.
    """
    buffers = [np.frombuffer(part, np.uint8) for part in parts]
    size = sum(buffer.size for buffer in buffers)
    if head.kind != Kind.DATA or len(buffers) != head.parts or size > limit_bytes:
        raise FrameDamaged(
            f"a frame with {len(buffers)} buffers of {size} bytes, which is not what it should be"
        )
    remaining = iter(buffers)
    whole = _checked(head.description, remaining, 0)
    if next(remaining, None) is not None:
        raise FrameDamaged("a frame has more buffers than it describes")
    return whole.make(memory)


# Packing


def _head(kind: Kind, number: int, description: Mapping[str, Any], parts: int) -> bytes:
    text = json.dumps(description, separators=(",", ":")).encode()
    if parts > MAX_PARTS or len(text) > MAX_DESCRIPTION:
        raise UsageError(
            f"a batch of {parts} parts, described in {len(text)} bytes, is more than a frame takes: "
            f"{MAX_PARTS} and {MAX_DESCRIPTION}"
        )
    fixed = HEAD.pack(MAGIC, VERSION, kind, 0, number, parts, len(text))
    return fixed + CRC.pack(google_crc32c.value(fixed + text)) + text


def _described(part: Any, buffers: list[Buffer], depth: int) -> dict[str, Any]:
    if depth > MAX_DEPTH:
        raise UsageError(f"a batch is nested more than {MAX_DEPTH} deep; flatten it")
    if isinstance(part, Mapping):
        if not all(isinstance(name, str) for name in part):
            raise UsageError(f"the names in a batch are strings, not {list(part)!r}")
        return {"dict": {name: _described(value, buffers, depth + 1) for name, value in part.items()}}
    if isinstance(part, list) and all(isinstance(x, bytes | bytearray | memoryview) for x in part):
        return {"count": len(part)} | _added(_joined(part), buffers)
    if isinstance(part, tuple | list):
        return {"tuple": [_described(value, buffers, depth + 1) for value in part]}
    array = _little_endian(np.asarray(part))
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return {"dtype": array.dtype.str, "shape": list(array.shape)} | _added(raw, buffers)


def _little_endian(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    little = array.dtype.newbyteorder("<")
    if little.str not in DTYPES:
        raise UsageError(f"an array of {array.dtype} cannot be sent; turn it into numbers or a list of bytes")
    return array.astype(little, copy=False)


def _joined(items: Sequence[bytes | bytearray | memoryview]) -> npt.NDArray[np.uint8]:
    lengths = np.array([memoryview(item).nbytes for item in items], LENGTH)
    return np.frombuffer(b"".join([lengths.tobytes(), *items]), np.uint8)


def _added(raw: npt.NDArray[np.uint8], buffers: list[Buffer]) -> dict[str, int]:
    buffers.extend(raw[start : start + PIECE] for start in range(0, max(1, len(raw)), PIECE))
    return {"bytes": len(raw), "crc32c": google_crc32c.value(raw)}


# Unpacking: first all is checked, into things that can be made, then they are made


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        description = json.loads(text.decode("ascii"), object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise FrameDamaged(f"a frame's description is not its JSON: {error}") from None
    if not isinstance(description, dict):
        raise FrameDamaged("a frame's description is no JSON object")
    return description


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice")
    return found


@dataclass(frozen=True)
class _Raw:
    """Some bytes in one buffer or, above PIECE, in several."""

    pieces: list[npt.NDArray[np.uint8]]
    size: int
    crc: int

    def copied(self, memory: Memory) -> npt.NDArray[np.uint8]:
        """In one pass, as each piece stays in the processor's cache between its checksum and its copy."""
        copy, crc, end = memory(self.size), 0, 0
        for piece in self.pieces:
            crc = google_crc32c.extend(crc, piece)
            copy[end : end + piece.size] = piece
            end += piece.size
        if crc != self.crc:
            raise FrameDamaged("a frame's buffer does not match its checksum")
        return copy


@dataclass(frozen=True)
class _Array:
    raw: _Raw
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def make(self, memory: Memory) -> npt.NDArray[Any]:
        return self.raw.copied(memory).view(self.dtype).reshape(self.shape)


@dataclass(frozen=True)
class _Items:
    raw: npt.NDArray[np.uint8]
    ends: list[int]

    def make(self, memory: Memory) -> list[bytes]:
        starts = [len(self.ends) * LENGTH.itemsize, *self.ends]
        return [self.raw[a:b].tobytes() for a, b in zip(starts, self.ends, strict=False)]


@dataclass(frozen=True)
class _Tuple:
    parts: list[Any]

    def make(self, memory: Memory) -> tuple[Any, ...]:
        return tuple(part.make(memory) for part in self.parts)


@dataclass(frozen=True)
class _Dict:
    parts: dict[str, Any]

    def make(self, memory: Memory) -> dict[str, Any]:
        return {name: part.make(memory) for name, part in self.parts.items()}


def _checked(node: Any, buffers: Any, depth: int) -> _Array | _Items | _Tuple | _Dict:
    match node:
        case {"dict": dict(parts), **rest} if not rest and depth <= MAX_DEPTH:
            return _Dict({name: _checked(part, buffers, depth + 1) for name, part in parts.items()})
        case {"tuple": list(parts), **rest} if not rest and depth <= MAX_DEPTH:
            return _Tuple([_checked(part, buffers, depth + 1) for part in parts])
        case {"count": count, "bytes": size, "crc32c": crc, **rest} if not rest:
            return _checked_items(_checked_raw(size, crc, buffers).copied(aligned), count)
        case {"dtype": dtype, "shape": shape, "bytes": size, "crc32c": crc, **rest} if not rest:
            return _checked_array(_checked_raw(size, crc, buffers), dtype, shape)
    raise FrameDamaged("a frame's description is not of the known form")


def _checked_raw(size: Any, crc: Any, buffers: Iterator[npt.NDArray[np.uint8]]) -> _Raw:
    if not _is_count(size) or not _is_count(crc):
        raise FrameDamaged("a frame describes a buffer without a size or a checksum")
    full, rest = divmod(max(size, 1) - 1, PIECE)
    pieces = list(islice(buffers, full + 1))
    if len(pieces) <= full or [piece.size for piece in pieces] != [PIECE] * full + [min(size, rest + 1)]:
        raise FrameDamaged("a frame describes a buffer of another size than it has")
    return _Raw(pieces, size, crc)


def _checked_items(raw: npt.NDArray[np.uint8], count: Any) -> _Items:
    if not _is_count(count) or count * LENGTH.itemsize > raw.size:
        raise FrameDamaged(f"a frame describes more pieces than fit into {raw.size} bytes")
    table = count * LENGTH.itemsize
    lengths = raw[:table].view(LENGTH).tolist()
    if sum(lengths) != raw.size - table:
        raise FrameDamaged("the lengths of a list's pieces do not add up to what there is")
    ends = (np.cumsum(lengths, dtype=np.int64) + table).tolist()
    return _Items(raw, ends)


def _checked_array(raw: _Raw, dtype: Any, shape: Any) -> _Array:
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise FrameDamaged("a frame has an array of a dtype that it must not have")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(map(_is_count, shape)):
        raise FrameDamaged("a frame has an array whose shape is none")
    found = np.dtype(dtype)
    if math.prod(max(side, 1) for side in shape) * found.itemsize > MAX_SIZE:
        raise FrameDamaged("a frame has an array whose shape is out of all bounds")
    if math.prod(shape) * found.itemsize != raw.size:
        raise FrameDamaged(f"a frame has {raw.size} bytes for {dtype} {shape}")
    return _Array(raw, found, tuple(shape))


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_SIZE
