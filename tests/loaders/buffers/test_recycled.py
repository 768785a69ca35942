"""Memory is used again after it was dropped, and not before."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from shardprep.loaders.batches.pickling import ALIGNMENT, MAX_IDLE_PIECES, MIN_RECYCLED_BYTES, Recycled


def address(array: Any) -> int:
    return int(array.ctypes.data)


def test_memory_comes_back_when_it_is_dropped() -> None:
    recycled = Recycled()
    first = recycled(MIN_RECYCLED_BYTES)
    where = address(first)
    assert where % ALIGNMENT == 0
    assert first.flags.writeable
    del first

    assert address(recycled(MIN_RECYCLED_BYTES)) == where


def test_memory_that_is_looked_at_by_anything_is_not_given_out() -> None:
    recycled = Recycled()
    memory = recycled(MIN_RECYCLED_BYTES)
    where = address(memory)
    views: list[Any] = [
        memory.view(np.int32).reshape(-1, 4)[1:, ::2],
        memory[10:20],
        memoryview(memory)[5:],
        np.frombuffer(memory.data, np.int8),
    ]
    del memory
    while views:
        assert address(recycled(MIN_RECYCLED_BYTES)) != where
        views.pop()

    assert where in {address(each) for each in [recycled(MIN_RECYCLED_BYTES) for _ in range(MAX_IDLE_PIECES)]}


def test_each_size_has_its_own_and_few_are_kept() -> None:
    recycled = Recycled()
    sizes = [MIN_RECYCLED_BYTES + 64 * n for n in range(3 * MAX_IDLE_PIECES)]
    held = [recycled(size) for size in sizes]
    assert [memory.size for memory in held] == sizes
    held.clear()

    assert len(recycled._idle) == MAX_IDLE_PIECES
    where = {memory.size: address(memory) for memory in recycled._idle}
    again = [recycled(size) for size in where]
    assert {memory.size: address(memory) for memory in again} == where


def test_small_memory_is_not_kept() -> None:
    recycled = Recycled()
    recycled(MIN_RECYCLED_BYTES - 1)
    assert not recycled._idle


def test_it_comes_back_from_any_thread() -> None:
    recycled = Recycled()
    held = [[recycled(MIN_RECYCLED_BYTES)] for _ in range(MAX_IDLE_PIECES)]
    threads = [threading.Thread(target=one.clear) for one in held]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(recycled._idle) == MAX_IDLE_PIECES
