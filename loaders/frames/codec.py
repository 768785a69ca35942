"""A batch as the buffers of a message: a header, then the raw bytes; see docs/reference/frames.md."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import UsageError
from shardprep.loaders.buffers.memory import aligned

from .bounds import DTYPES, MAX_DIMENSIONS, MAX_SIZE, FrameDamaged, is_count
from .lists import are_alike, checked_list, packed_arrays, packed_items

Buffer = bytes | npt.NDArray[np.uint8]
Memory = Callable[[int], npt.NDArray[np.uint8]]

MAGIC = b"SPBF"
VERSION = 1
HEAD = struct.Struct("<4sBBHQII")
CRC = struct.Struct("<I")
PIECE = 1 << 20  # bytes of a buffer; libzmq allocates larger ones each time, at a quarter of the speed
MAX_PARTS = 4096  # buffers after the header
MAX_DEPTH = 8
MAX_DESCRIPTION = 1 << 16
DEFAULT_LIMIT = 256 << 20  # bytes of a batch


class FrameKind(IntEnum):
    """The kind of a frame. docs/reference has which end sends which kind, and when: frames.md, wire.md."""

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
    """The fields of a header.

    ``number`` is the number of the batch, or what the kind counts; ``parts`` buffers follow the header.
    ``description`` is the form of a DATA frame's batch; for other kinds it maps names to short values.
    """

    kind: FrameKind
    number: int
    parts: int
    description: dict[str, Any]


def pack_batch(batch: Any, number: int = 0) -> list[Buffer]:
    """Return a DATA frame: a header, and the bytes of each part. Contiguous arrays are not copied.

    A batch is an array, a list of bytes, a list of text, JsonValues, or a tuple, dict or other list of these,
    nested at most MAX_DEPTH deep. Arrays are of booleans, integers, floats or complex numbers. The buffers
    alias the batch, which must not change until they are sent. Raises UsageError for anything else.
    """
    buffers: list[Buffer] = []
    description = _described(batch, buffers, 0)
    return [_head(FrameKind.DATA, number, description, len(buffers)), *buffers]


def pack_note(kind: FrameKind, number: int = 0, **notes: str | int) -> list[Buffer]:
    """Return a frame without arrays."""
    return [_head(kind, number, notes, 0)]


def read_head(part: Any) -> Head:
    """Return the header in ``part``, the first buffer of a message (bytes-like). Raises FrameDamaged."""
    data = bytes(memoryview(part)[: HEAD.size + CRC.size + MAX_DESCRIPTION + 1])
    if len(data) < HEAD.size + CRC.size:
        raise FrameDamaged(f"a frame's header of {len(data)} bytes is too short")
    magic, version, kind, zero, number, parts, length = HEAD.unpack_from(data)
    text = data[HEAD.size + CRC.size :]
    if (magic, version, zero, length) != (MAGIC, VERSION, 0, len(text)) or kind >= len(FrameKind):
        raise FrameDamaged("this is not the header of a frame of version 1")
    if google_crc32c.value(data[: HEAD.size] + text) != CRC.unpack_from(data, HEAD.size)[0]:
        raise FrameDamaged("a frame's header does not match its checksum")
    if parts > MAX_PARTS or length > MAX_DESCRIPTION:
        raise FrameDamaged(f"a frame of {parts} parts and a description of {length} bytes is too large")
    return Head(FrameKind(kind), number, parts, _parsed(text))


def unpack_batch(
    head: Head, parts: Sequence[Any], *, limit_bytes: int = DEFAULT_LIMIT, memory: Memory = aligned
) -> Any:
    """Return the batch of a DATA frame. Its arrays are copied once, into memory aligned to 64 bytes.

    ``head`` is what :func:`read_head` returned, ``parts`` are the buffers after the header. ``limit_bytes``
    bounds the sum of their sizes. ``memory`` allocates: it maps a size in bytes to a uint8 array [size].

    Named tuples are returned as tuples. Lengths, shapes
    and dtypes are checked before anything is allocated, checksums as the bytes are copied. Raises
    FrameDamaged where a check fails.
    """
    buffers = [np.frombuffer(part, np.uint8) for part in parts]
    size = sum(buffer.size for buffer in buffers)
    if head.kind != FrameKind.DATA or len(buffers) != head.parts or size > limit_bytes:
        raise FrameDamaged(
            f"a {head.kind.name} frame with {len(buffers)} buffers of {size} bytes, not DATA with {head.parts} buffers "
            f"of at most {limit_bytes} bytes"
        )
    remaining = iter(buffers)
    checked = _checked(head.description, remaining, 0)
    if next(remaining, None) is not None:
        raise FrameDamaged("a frame has more buffers than it describes")
    return checked.make(memory)


def _head(kind: FrameKind, number: int, description: Mapping[str, Any], parts: int) -> bytes:
    text = json.dumps(description, separators=(",", ":")).encode()
    if parts > MAX_PARTS or len(text) > MAX_DESCRIPTION:
        raise UsageError(
            f"a batch of {parts} buffers, described in {len(text)} bytes, is too large for a frame: at most "
            f"{MAX_PARTS} buffers and {MAX_DESCRIPTION} bytes"
        )
    fixed = HEAD.pack(MAGIC, VERSION, kind, 0, number, parts, len(text))
    return fixed + CRC.pack(google_crc32c.value(fixed + text)) + text


def _described(part: Any, buffers: list[Buffer], depth: int) -> dict[str, Any]:
    if depth > MAX_DEPTH:
        raise UsageError(f"a batch is nested more than {MAX_DEPTH} deep; flatten it")
    if isinstance(part, Mapping):
        if not all(isinstance(name, str) for name in part):
            raise UsageError(f"the keys of a dict in a batch must be strings, not {list(part)!r}")
        return {"dict": {name: _described(value, buffers, depth + 1) for name, value in part.items()}}
    if isinstance(part, list) and (packed := packed_items(part) or _packed_arrays(part)):
        described, raw = packed
        return described | _added(raw, buffers)
    if isinstance(part, tuple | list):
        kind = "tuple" if isinstance(part, tuple) else "list"
        return {kind: [_described(value, buffers, depth + 1) for value in part]}
    array = _little_endian(np.asarray(part))
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return {"dtype": array.dtype.str, "shape": list(array.shape)} | _added(raw, buffers)


def _packed_arrays(part: list[Any]) -> tuple[dict[str, Any], npt.NDArray[np.uint8]] | None:
    return packed_arrays([_little_endian(array) for array in part]) if are_alike(part) else None


def _little_endian(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    little = array.dtype.newbyteorder("<")
    if little.str not in DTYPES:
        raise UsageError(f"an array of {array.dtype} cannot be sent; turn it into numbers or a list of bytes")
    return array.astype(little, copy=False)


def _added(raw: npt.NDArray[np.uint8], buffers: list[Buffer]) -> dict[str, int]:
    buffers.extend(raw[start : start + PIECE] for start in range(0, max(1, len(raw)), PIECE))
    return {"bytes": len(raw), "crc32c": google_crc32c.value(raw)}


# Unpacking: everything is checked first, then the parts are made


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        description = json.loads(text.decode("ascii"), object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise FrameDamaged(f"a frame's description is not valid JSON: {error}") from None
    if not isinstance(description, dict):
        raise FrameDamaged("a frame's description is not a JSON object")
    return description


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice")
    return found


@dataclass(frozen=True)
class _RawBytes:
    """The bytes of one array or list, in one buffer or, above PIECE, in several."""

    pieces: list[npt.NDArray[np.uint8]]
    size: int
    crc: int

    def copied(self, memory: Memory) -> npt.NDArray[np.uint8]:
        """Return a copy, in one pass: a piece stays in the processor's cache between checksum and copy."""
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
    raw: _RawBytes
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def make(self, memory: Memory) -> npt.NDArray[Any]:
        return self.raw.copied(memory).view(self.dtype).reshape(self.shape)


@dataclass(frozen=True)
class _List:
    raw: _RawBytes
    unpacked: Callable[[npt.NDArray[np.uint8]], list[Any]]

    def make(self, memory: Memory) -> list[Any]:
        return self.unpacked(self.raw.copied(memory))


@dataclass(frozen=True)
class _Sequence:
    kind: Callable[[Iterable[Any]], Any]
    parts: list[Any]

    def make(self, memory: Memory) -> Any:
        return self.kind(part.make(memory) for part in self.parts)


@dataclass(frozen=True)
class _Dict:
    parts: dict[str, Any]

    def make(self, memory: Memory) -> dict[str, Any]:
        return {name: part.make(memory) for name, part in self.parts.items()}


def _checked(node: Any, buffers: Any, depth: int) -> _Array | _List | _Sequence | _Dict:
    match node:
        case {"dict": dict(parts), **rest} if not rest and depth <= MAX_DEPTH:
            return _Dict({name: _checked(part, buffers, depth + 1) for name, part in parts.items()})
        case {"tuple": list(parts), **rest} if not rest and depth <= MAX_DEPTH:
            return _Sequence(tuple, [_checked(part, buffers, depth + 1) for part in parts])
        case {"list": list(parts), **rest} if not rest and depth <= MAX_DEPTH:
            return _Sequence(list, [_checked(part, buffers, depth + 1) for part in parts])
        case {"count": count, "bytes": size, "crc32c": crc, **rest}:
            return _List(_checked_raw(size, crc, buffers), checked_list(count, rest))
        case {"dtype": dtype, "shape": shape, "bytes": size, "crc32c": crc, **rest} if not rest:
            return _checked_array(_checked_raw(size, crc, buffers), dtype, shape)
    raise FrameDamaged("a frame's description is not of the known form")


def _checked_raw(size: Any, crc: Any, buffers: Iterator[npt.NDArray[np.uint8]]) -> _RawBytes:
    if not is_count(size) or not is_count(crc):
        raise FrameDamaged("a frame describes a buffer without a size or a checksum")
    full, rest = divmod(max(size, 1) - 1, PIECE)
    pieces = list(islice(buffers, full + 1))
    if len(pieces) <= full or [piece.size for piece in pieces] != [PIECE] * full + [min(size, rest + 1)]:
        raise FrameDamaged("a buffer of a frame does not have the described size")
    return _RawBytes(pieces, size, crc)


def _checked_array(raw: _RawBytes, dtype: Any, shape: Any) -> _Array:
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise FrameDamaged("a frame has an array of a dtype that is not allowed")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(map(is_count, shape)):
        raise FrameDamaged("a frame has an array without a valid shape")
    found = np.dtype(dtype)
    if math.prod(max(side, 1) for side in shape) * found.itemsize > MAX_SIZE:
        raise FrameDamaged("the shape of an array in a frame is too large")
    if math.prod(shape) * found.itemsize != raw.size:
        raise FrameDamaged(f"a frame has {raw.size} bytes for {dtype} {shape}")
    return _Array(raw, found, tuple(shape))
