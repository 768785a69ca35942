"""A thread's CPU clock: it counts all computing, however short, and no sleep."""

from __future__ import annotations

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


def test_without_the_kernels_account_nothing_is_known_of_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_table, "SCHEDSTAT", "/nowhere")
    clock = CpuClock()

    told, whole = computed_in_pieces(clock)

    assert 0.5 * whole < told <= whole
    assert np.array_equal(clock.read()[1:], [0.0])
