"""Memory is used again after it was dropped, and not before."""

from __future__ import annotations

from typing import Any

from shardprep.loaders.batches.pickling import ALIGNMENT, MIN_RECYCLED_BYTES, MemoryPool


def address(array: Any) -> int:
    return int(array.ctypes.data)


def test_memory_comes_back_when_it_is_dropped() -> None:
    recycled = MemoryPool()
    first = recycled(MIN_RECYCLED_BYTES)
    where = address(first)
    assert where % ALIGNMENT == 0
    assert first.flags.writeable
    del first

    assert address(recycled(MIN_RECYCLED_BYTES)) == where
