"""Memory that was dropped is used again, and never before."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from shardprep.loaders.memory import ALIGNMENT
from shardprep.loaders.recycled import KEPT, LEAST, Recycled


def address(array: Any) -> int:
    return int(array.ctypes.data)


def test_memory_comes_back_when_it_is_dropped() -> None:
    recycled = Recycled()
    first = recycled(LEAST)
    where = address(first)
    assert where % ALIGNMENT == 0
    assert first.flags.writeable
    del first

    assert address(recycled(LEAST)) == where


def test_memory_that_is_looked_at_by_anything_is_not_given_out() -> None:
    recycled = Recycled()
    memory = recycled(LEAST)
    where = address(memory)
    views: list[Any] = [
        memory.view(np.int32).reshape(-1, 4)[1:, ::2],
        memory[10:20],
        memoryview(memory)[5:],
        np.frombuffer(memory.data, np.int8),
    ]
    del memory
    while views:
        assert address(recycled(LEAST)) != where
        views.pop()

    assert where in {address(each) for each in [recycled(LEAST) for _ in range(KEPT)]}


def test_each_size_has_its_own_and_few_are_kept() -> None:
    recycled = Recycled()
    sizes = [LEAST + 64 * n for n in range(3 * KEPT)]
    held = [recycled(size) for size in sizes]
    assert [memory.size for memory in held] == sizes
    held.clear()

    assert len(recycled._idle) == KEPT
    where = {memory.size: address(memory) for memory in recycled._idle}
    again = [recycled(size) for size in where]
    assert {memory.size: address(memory) for memory in again} == where


def test_small_memory_is_not_kept() -> None:
    recycled = Recycled()
    recycled(LEAST - 1)
    assert not recycled._idle


def test_it_comes_back_from_any_thread() -> None:
    recycled = Recycled()
    held = [[recycled(LEAST)] for _ in range(KEPT)]
    threads = [threading.Thread(target=one.clear) for one in held]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(recycled._idle) == KEPT
