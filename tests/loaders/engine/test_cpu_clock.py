"""A thread's CPU clock: it counts all computing, however short, and no sleep."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from shardprep.loaders.engine import messages as status_table
from shardprep.loaders.engine.messages import CpuClock


def computed_in_pieces(clock: CpuClock) -> tuple[float, float]:
    """Seconds on a CPU over a hundred pieces shorter than a tick, by this clock and by the kernel's."""
    told, began = 0.0, time.thread_time()
    for _ in range(100):
        time.sleep(0.0005)
        before = clock.read()
        sum(range(20_000))
        told += float((clock.read() - before)[0])
    return told, time.thread_time() - began


def test_work_that_is_shorter_than_a_tick_is_counted() -> None:
    told, whole = computed_in_pieces(CpuClock())

    assert 0.5 * whole < told <= whole


def test_sleep_is_neither_computing_nor_waiting_for_a_cpu() -> None:
    clock = CpuClock()
    before, began = clock.read(), time.perf_counter()
    time.sleep(0.2)

    assert (clock.read() - before).sum() < 0.5 * (time.perf_counter() - began)


def test_other_threads_are_not_counted() -> None:
    clock, spent = CpuClock(), []
    before = clock.read()
    thread = threading.Thread(target=lambda: spent.append(sum(range(3_000_000)) and time.thread_time()))
    thread.start()
    thread.join()

    assert clock.read()[0] - before[0] < 0.5 * spent[0]


def test_without_the_kernels_account_nothing_is_known_of_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_table, "SCHEDSTAT", "/nowhere")
    clock = CpuClock()

    told, whole = computed_in_pieces(clock)

    assert 0.5 * whole < told <= whole
    assert np.array_equal(clock.read()[1:], [0.0])
