"""Serialization of a batch as a header and raw buffers; see docs/reference/frames.md.

A list of bytes, text, JSON values, or arrays that differ in shape only is packed into one buffer: a table of
8-byte numbers (the byte length of each item, or the shape of each array), then the items without gaps.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate, islice, pairwise
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import DataError, UsageError
from shardprep.formats.records.schema import FINITE_JSON
from shardprep.loaders.batches.pickling import allocate_aligned
from shardprep.loaders.batches.stack import JsonValues, to_unmasked_array

Raw = npt.NDArray[np.uint8]
Buffer = bytes | Raw
Memory = Callable[[int], Raw]

DTYPES = frozenset(
    ["|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16"]
)
ITEM_FORMS: Any = ({}, {"of": "text"}, {"of": "json"})  # of lists of bytes, text and JSON values
JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)
LENGTH = np.dtype("<u8")
MAX_SIZE = (1 << 63) - 1  # bytes that numpy can address

MAGIC = b"SPBF"
VERSION = 1
HEAD = struct.Struct("<4sBBHQII")
CRC = struct.Struct("<I")
PIECE = 1 << 20  # bytes per buffer; libzmq allocates memory for each larger one, at a quarter of the speed
MAX_PARTS = 4096  # buffers after the header
MAX_ITEMS = 1 << 20  # of the packed lists of a batch; each takes up to 200 bytes, however few it has itself
MAX_DEPTH = 8
MAX_AXES = 64  # NumPy's; the product of very many sides takes hours
MAX_DESCRIPTION = 1 << 16
DEFAULT_LIMIT = 256 << 20  # bytes of a batch


class FrameDamaged(DataError):
    """The frame is malformed or corrupt, and is not used."""


class FrameKind(IntEnum):
    """The kind of a frame. For who sends which kind, and when, see docs/reference: frames.md, wire.md."""

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
    """A frame header, followed by ``parts`` buffers.

    ``number`` is the batch number, or a count whose meaning depends on the kind. ``description`` is the
    structure of a DATA frame's batch; in other kinds it maps names to short values.
    """

    kind: FrameKind
    number: int
    parts: int
    description: dict[str, Any]


def pack_batch(batch: Any, number: int = 0) -> list[Buffer]:
    """Return a DATA frame: a header, and the bytes of each part. Contiguous arrays are not copied.

    A batch is an array, a list of bytes, a list of text, JsonValues, or a tuple, dict or other list of these,
    nested at most MAX_DEPTH deep. Arrays hold booleans, integers, floats or complex numbers. The buffers
    alias the batch, so it must not change until they are sent. Raises UsageError for any other batch.
    """
    buffers: list[Buffer] = []
    description = _describe(batch, buffers, 0)
    return [_pack_head(FrameKind.DATA, number, description, len(buffers)), *buffers]


def pack_note(kind: FrameKind, number: int = 0, **notes: str | int) -> list[Buffer]:
    """Return a frame that has only a header."""
    return [_pack_head(kind, number, notes, 0)]


def read_head(part: Any) -> Head:
    """Parse the header in ``part``, the first buffer of a message (bytes-like). Raises FrameDamaged."""
    data = bytes(memoryview(part)[: HEAD.size + CRC.size + MAX_DESCRIPTION + 1])
    if len(data) < HEAD.size + CRC.size:
        raise FrameDamaged(f"a frame's header of {len(data)} bytes is too short")
    magic, version, kind, zero, number, parts, length = HEAD.unpack_from(data)
    text = data[HEAD.size + CRC.size :]
    if (magic, version, zero, length) != (MAGIC, VERSION, 0, len(text)) or kind >= len(FrameKind):
        raise FrameDamaged("this is not the header of a frame of version 1")
    if google_crc32c.value(data[: HEAD.size] + text) != CRC.unpack_from(data, HEAD.size)[0]:
        raise FrameDamaged("a frame's header does not match its checksum")
    try:
        description = json.loads(text.decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise FrameDamaged(f"a frame's description is not valid JSON: {error}") from None
    if not isinstance(description, dict):
        raise FrameDamaged("a frame's description is not a JSON object")
    return Head(FrameKind(kind), number, parts, description)


def unpack_batch(
    head: Head, parts: Sequence[Any], *, limit_bytes: int = DEFAULT_LIMIT, memory: Memory = allocate_aligned
) -> Any:
    """Return the batch of a DATA frame. Its arrays are copied once, into memory aligned to 64 bytes.

    Lengths and dtypes are checked before memory is allocated, checksums during the copy, shapes after it.

    Args:
        head: The header, from :func:`read_head`.
        parts: The buffers after the header.
        limit_bytes: Maximum total size of the buffers.
        memory: Allocator: maps a size in bytes to a uint8 array [size].

    Returns:
        The batch; named tuples become tuples.

    Raises:
        FrameDamaged: A check fails.
    """
    buffers = [np.frombuffer(part, np.uint8) for part in parts]
    size = sum(buffer.size for buffer in buffers)
    if head.kind != FrameKind.DATA or len(buffers) != head.parts or size > limit_bytes:
        raise FrameDamaged(
            f"a {head.kind.name} frame with {len(buffers)} buffers of {size} bytes, not DATA with {head.parts} buffers "
            f"of at most {limit_bytes} bytes"
        )
    remaining = iter(buffers)
    try:
        if (items := _count_items(head.description)) > MAX_ITEMS:
            raise FrameDamaged(f"a frame describes lists of {items} items, more than {MAX_ITEMS}")
        batch = _unpack(head.description, remaining, memory, 0)
    except (ValueError, OverflowError, RecursionError) as error:  # of numpy and json
        raise FrameDamaged(f"a frame's buffers do not match its description: {error}") from None
    if next(remaining, None) is not None:
        raise FrameDamaged("a frame has more buffers than it describes")
    return batch


def _pack_head(kind: FrameKind, number: int, description: Mapping[str, Any], parts: int) -> bytes:
    text = json.dumps(description, separators=(",", ":")).encode()
    if parts > MAX_PARTS or len(text) > MAX_DESCRIPTION or _count_items(description) > MAX_ITEMS:
        raise UsageError(
            f"a {kind.name} frame of {parts} buffers, described in {len(text)} bytes, is too large: at most {MAX_PARTS} "
            f"buffers, {MAX_DESCRIPTION} bytes, and {MAX_ITEMS} items of lists; send batches of fewer parts, or give a "
            "shorter identity="
        )
    fixed = HEAD.pack(MAGIC, VERSION, kind, 0, number, parts, len(text))
    return fixed + CRC.pack(google_crc32c.value(fixed + text)) + text


def _describe(part: Any, buffers: list[Buffer], depth: int) -> dict[str, Any]:
    """Append a part's buffers to ``buffers``, and return its description."""
    if depth > MAX_DEPTH:
        raise UsageError(f"a batch is nested more than {MAX_DEPTH} deep; flatten it")
    if isinstance(part, Mapping):
        if not all(isinstance(name, str) for name in part):
            raise UsageError(f"the keys of a dict in a batch must be strings, not {list(part)!r}")
        return {"dict": {name: _describe(value, buffers, depth + 1) for name, value in part.items()}}
    if isinstance(part, list) and (packed := _pack_list(part)):
        described, raw = packed
    elif isinstance(part, tuple | list):
        kind = "tuple" if isinstance(part, tuple) else "list"
        return {kind: [_describe(value, buffers, depth + 1) for value in part]}
    else:
        array = _to_little_endian(part)
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        described = {"dtype": array.dtype.str, "shape": list(array.shape)}
    buffers.extend(raw[start : start + PIECE] for start in range(0, max(1, len(raw)), PIECE))
    return described | {"bytes": len(raw), "crc32c": google_crc32c.value(raw)}


def _pack_list(part: list[Any]) -> tuple[dict[str, Any], Raw] | None:
    """Return the description and bytes of a list that is packed as a whole, else None."""
    of: dict[str, Any] = {}
    items = part
    if isinstance(part, JsonValues) or (part and all(isinstance(item, str) for item in part)):
        of = {"of": "json" if isinstance(part, JsonValues) else "text"}
        try:
            items = [(JSON.encode(item) if of["of"] == "json" else item).encode() for item in part]
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"an item of a list of {of['of']} cannot be sent: {error}") from error
    elif part and all(type(item) is np.ndarray for item in part):
        if len({(item.dtype.str, item.ndim) for item in part}) > 1:
            return None
        arrays = [_to_little_endian(array) for array in part]
        of, items = {"of": arrays[0].dtype.str, "axes": arrays[0].ndim}, [each.tobytes() for each in arrays]
    elif not all(isinstance(item, bytes | bytearray | memoryview) for item in part):
        return None
    table = [array.shape for array in part] if "axes" in of else [memoryview(item).nbytes for item in items]
    raw = b"".join([np.array(table, LENGTH).tobytes(), *items])
    return {"count": len(items)} | of, np.frombuffer(raw, np.uint8)


def _to_little_endian(part: Any) -> npt.NDArray[Any]:
    array = to_unmasked_array(part)
    little = array.dtype.newbyteorder("<")
    if little.str not in DTYPES:
        kind = f"an array of {array.dtype}" if isinstance(part, np.ndarray) else f"a {type(part).__name__}"
        raise UsageError(f"{kind} cannot be sent; turn it into numbers, or a list of bytes or text")
    return array.astype(little, copy=False)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_SIZE


def _count_items(node: Any) -> int:
    """Return the number of items of all packed lists in a description."""
    if isinstance(node, dict):
        own: Any = node.get("count")
        return (own if _is_count(own) else 0) + sum(map(_count_items, node.values()))
    return sum(map(_count_items, node)) if isinstance(node, list) else 0


def _unpack(node: Any, buffers: Iterator[Raw], memory: Memory, depth: int) -> Any:
    """Return the part that ``node`` describes, from the next buffers. Raises FrameDamaged."""
    match node:
        case {"dict": dict(parts), **rest} if not rest and depth <= MAX_DEPTH:
            return {name: _unpack(part, buffers, memory, depth + 1) for name, part in parts.items()}
        case {"tuple": list(parts), **rest} if not rest and depth <= MAX_DEPTH:
            return tuple([_unpack(part, buffers, memory, depth + 1) for part in parts])
        case {"list": list(parts), **rest} if not rest and depth <= MAX_DEPTH:
            return [_unpack(part, buffers, memory, depth + 1) for part in parts]
        case {"dtype": str(dtype), "shape": list(shape), "bytes": size, "crc32c": crc, **rest} if (
            not rest and dtype in DTYPES and all(map(_is_count, shape))
        ):
            return _join_pieces(size, crc, buffers, memory).view(dtype).reshape(shape)
        case {"count": count, "bytes": size, "crc32c": crc, **rest} if (
            _is_count(count) and rest in ITEM_FORMS
        ):
            return _unpack_list(_join_pieces(size, crc, buffers, memory), count, str(rest.get("of", "bytes")))
        case {"count": count, "of": str(dtype), "axes": axes, "bytes": size, "crc32c": crc, **rest} if (
            not rest and _is_count(count) and dtype in DTYPES and _is_count(axes) and axes <= MAX_AXES
        ):
            return _unpack_list(_join_pieces(size, crc, buffers, memory), count, dtype, axes)
    raise FrameDamaged("a frame's description is not of the known form")


def _join_pieces(size: Any, expected_crc: Any, buffers: Iterator[Raw], memory: Memory) -> Raw:
    """Join the buffers of one array or list, which has several if it is larger than PIECE.

    Each piece is checksummed and copied at once, while it is in the processor's cache.
    """
    if not _is_count(size) or not _is_count(expected_crc):
        raise FrameDamaged("a frame describes a buffer without a size or a checksum")
    full, rest = divmod(max(size, 1) - 1, PIECE)
    pieces = list(islice(buffers, full + 1))
    if len(pieces) <= full or [piece.size for piece in pieces] != [PIECE] * full + [min(size, rest + 1)]:
        raise FrameDamaged("a buffer of a frame does not have the described size")
    copy, crc, end = memory(size), 0, 0
    for piece in pieces:
        crc = google_crc32c.extend(crc, piece)
        copy[end : end + piece.size] = piece
        end += piece.size
    if crc != expected_crc:
        raise FrameDamaged("a frame's buffer does not match its checksum")
    return copy


def _unpack_list(raw: Raw, count: int, of: str, axes: int = 1) -> list[Any]:
    """Return the items of a packed list; arrays (``of`` a dtype) are views of its buffer."""
    end = count * axes * LENGTH.itemsize
    if max(end, count) > raw.size:  # a 0-d array has no shape in the table, but at least one byte
        raise FrameDamaged(f"a frame describes more items than fit into {raw.size} bytes")
    table = raw[:end].view(LENGTH)
    shapes, sizes = [], table.tolist()
    if of in DTYPES:
        shapes, width = table.reshape(count, axes).tolist(), np.dtype(of).itemsize
        sizes = [math.prod(shape) * width for shape in shapes]
    if sum(sizes) != raw.size - end:
        raise FrameDamaged("the sizes of a list's items do not add up to the list's")
    bounds = pairwise(accumulate(sizes, initial=end))
    if of in DTYPES:
        return [raw[a:b].view(of).reshape(shape) for shape, (a, b) in zip(shapes, bounds, strict=True)]
    items = [raw[a:b].tobytes() for a, b in bounds]
    if of == "bytes":
        return items
    texts = [item.decode() for item in items]
    return texts if of == "text" else JsonValues(map(FINITE_JSON.decode, texts))
