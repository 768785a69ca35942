"""Lists as one buffer: of bytes, of text, of JSON values, and of arrays that differ in shape only.

A list's buffer begins with a table of numbers, LENGTH each: the length in bytes of each item, or the shape of
each array. The items follow, without gaps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import UsageError
from shardprep.loaders.batching.json_values import JsonValues

from .bounds import DTYPES, MAX_DIMENSIONS, MAX_SIZE, FrameDamaged, is_count

LENGTH = np.dtype("<u8")
Raw = npt.NDArray[np.uint8]


def packed_items(part: list[Any]) -> tuple[dict[str, Any], Raw] | None:
    """Return the description and the buffer of a list of bytes, text or JSON; None for any other list."""
    of: dict[str, Any]
    if isinstance(part, JsonValues):
        of, items = {"of": "json"}, list(map(_json_bytes, part))
    elif all(isinstance(item, bytes | bytearray | memoryview) for item in part):
        of, items = {}, part
    elif all(isinstance(item, str) for item in part):
        of, items = {"of": "text"}, list(map(_text_bytes, part))
    else:
        return None
    lengths = np.array([memoryview(item).nbytes for item in items], LENGTH)
    return {"count": len(items)} | of, np.frombuffer(b"".join([lengths.tobytes(), *items]), np.uint8)


def packed_arrays(part: Sequence[npt.NDArray[Any]]) -> tuple[dict[str, Any], Raw]:
    """Return the description and the buffer of little-endian arrays of one dtype and number of axes."""
    shapes = np.array([array.shape for array in part], LENGTH).tobytes()
    raw = np.frombuffer(b"".join([shapes, *(array.tobytes() for array in part)]), np.uint8)
    return {"count": len(part), "of": part[0].dtype.str, "axes": part[0].ndim}, raw


def are_alike(part: list[Any]) -> bool:
    """Whether a list has arrays, and these differ in shape only."""
    if not part or not all(type(item) is np.ndarray for item in part):
        return False
    return len({(item.dtype.str, item.ndim) for item in part}) == 1


def _text_bytes(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"text with surrogates cannot be sent: {text[:80]!r}") from error


def _json_bytes(value: Any) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"a list of JSON values has one that is none: {error}") from error


OF_ITEMS: dict[str, Callable[[list[bytes]], list[Any]]] = {
    "bytes": lambda items: items,
    "text": lambda items: [item.decode() for item in items],
    "json": lambda items: JsonValues(
        json.loads(item.decode(), parse_constant=_no_constant) for item in items
    ),
}


def checked_list(count: Any, rest: Mapping[Any, Any]) -> Callable[[Raw], list[Any]]:
    """Return what makes a list of its buffer, by its description. Raises FrameDamaged."""
    if is_count(count):
        match rest:
            case {"of": "text" | "json" as of, **more} if not more:
                return partial(_unpacked_items, count=count, of=of)
            case {"of": str(dtype), "axes": axes, **more} if not more and dtype in DTYPES:
                if is_count(axes) and axes <= MAX_DIMENSIONS:
                    return partial(_unpacked_arrays, count=count, dtype=np.dtype(dtype), axes=axes)
            case {} if not rest:
                return partial(_unpacked_items, count=count, of="bytes")
    raise FrameDamaged("a frame's description is not of the known form")


def _unpacked_items(raw: Raw, count: int, of: str) -> list[Any]:
    """Return the items of such a buffer. Raises FrameDamaged."""
    table = _table(raw, count, 1)
    lengths = table.tolist()
    if sum(lengths) != raw.size - table.nbytes:
        raise FrameDamaged("the lengths of a list's items do not add up to its size")
    ends = (np.cumsum(lengths, dtype=np.int64) + table.nbytes).tolist()
    starts = [table.nbytes, *ends]
    items = [raw[a:b].tobytes() for a, b in zip(starts, ends, strict=False)]
    try:
        return OF_ITEMS[of](items)
    except (ValueError, RecursionError) as error:
        raise FrameDamaged(f"a frame has a list of {of} with an item that is none: {error}") from None


def _unpacked_arrays(raw: Raw, count: int, dtype: np.dtype[Any], axes: int) -> list[npt.NDArray[Any]]:
    """Return the arrays of such a buffer, as views of it. Raises FrameDamaged."""
    table = _table(raw, count, axes)
    shapes = table.reshape(count, axes).tolist()
    sizes = [math.prod(shape) * dtype.itemsize for shape in shapes]
    if sum(sizes) != raw.size - table.nbytes or any(
        math.prod(max(s, 1) for s in shape) >> 62 for shape in shapes
    ):
        raise FrameDamaged("the shapes of a list's arrays do not add up to its size")
    arrays, start = [], table.nbytes
    for shape, size in zip(shapes, sizes, strict=True):
        arrays.append(raw[start : start + size].view(dtype).reshape(shape))
        start += size
    return arrays


def _is_too_large(shape: list[int], dtype: np.dtype[Any]) -> bool:
    """Whether numpy cannot address such an array, even if it has no elements."""
    return math.prod(max(side, 1) for side in shape) * dtype.itemsize > MAX_SIZE


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _table(raw: Raw, count: int, numbers: int) -> npt.NDArray[np.uint64]:
    size = count * numbers * LENGTH.itemsize
    if max(size, count) > raw.size:  # arrays without axes have elements all the same
        raise FrameDamaged(f"a frame describes more items than fit into {raw.size} bytes")
    return raw[:size].view(LENGTH)
