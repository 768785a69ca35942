"""Inputs that an engine sends beside its items, and batches that come as they are finished."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from shardprep.loaders.batches.pickling import Pickled
from shardprep.loaders.batches.slots import SlotLayout, SlotRing
from shardprep.loaders.engine.dispatcher import BatchRequest, NotReady, Plan
from shardprep.loaders.engine.engine import Engine
from support.engine_workers import PLACE, Receiving, Writing, layout

MIB = 1 << 20


def shipment(*values: object) -> BatchRequest:
    places, inputs, at = [], [], 0
    for value in values:
        piece = Pickled.of(value)
        places.append((at, piece.size))
        inputs.append((at, piece))
        at += -(-piece.size // 64) * 64
    return BatchRequest(np.array(places, PLACE), tuple(inputs))


def values_of(engine: Engine, shipments: list[BatchRequest]) -> list[Any]:
    return [value for batch in engine.run(shipments) for value in batch.payloads.values()]


@pytest.mark.torture
def test_cargo_reaches_the_row_that_it_is_for() -> None:
    slot = SlotLayout(8, (), spare=MIB, inputs=64 * MIB, sparse=True)
    groups = [[(n, np.full(n * 1000, n), str(n)) for n in range(k, k + 5)] for k in range(0, 100, 5)]
    with Engine(Receiving(), slot, workers=2, slots=4) as engine:
        for _ in range(2):
            found = values_of(engine, [shipment(*group) for group in groups])
            np.testing.assert_equal(found, [value for group in groups for value in group])


@pytest.mark.torture
def test_a_result_beyond_the_spare_bytes_arrives_all_the_same() -> None:
    slot = SlotLayout(2, (), spare=4096, inputs=64 * MIB, sparse=True)
    large = np.arange(300_000)
    with Engine(Receiving(), slot, workers=1, slots=3) as engine:
        (found,) = values_of(engine, [shipment({"a": large, "b": b"x"})])

    np.testing.assert_equal(found, {"a": large, "b": b"x"})
    assert found["a"].ctypes.data % 64 == 0
    assert found["a"].flags.writeable


@pytest.mark.torture
def test_results_that_are_held_are_copied_one_by_one_and_stay_as_they_were() -> None:
    slot = SlotLayout(4, (), spare=MIB, inputs=MIB, sparse=True)
    with Engine(Receiving(), slot, workers=2, slots=4) as engine:
        held = values_of(engine, [shipment(*(np.full(1000, 4 * k + n) for n in range(4))) for k in range(50)])
        assert engine.stats().copied > 0

    assert [set(value.tolist()) for value in held] == [{n} for n in range(200)]
    assert all(value.base.nbytes < 100_000 for value in held[-4:])


@pytest.mark.torture
def test_a_killed_worker_s_cargo_is_worked_on_by_another() -> None:
    slot = SlotLayout(8, (), spare=MIB, inputs=MIB, sparse=True)
    with Engine(Receiving(), slot, workers=2, slots=4) as engine:
        found: list[Any] = []
        for batch in engine.run(shipment(*range(k, k + 8)) for k in range(0, 800, 8)):
            found += batch.payloads.values()
            if len(found) == 80:
                for worker in multiprocessing.active_children():
                    os.kill(worker.pid or 0, signal.SIGKILL)

    assert found == list(range(800))


def test_a_sparse_ring_takes_memory_only_where_it_is_written() -> None:
    ring = SlotRing(SlotLayout(1, (), spare=1 << 32, sparse=True), 8)
    try:
        before = _shared_memory()
        ring.memory(5)[: 1 << 20] = 1
        assert 0 < _shared_memory() - before < 1 << 22
    finally:
        ring.close()


def _shared_memory() -> int:
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssShmem"].split()[0]) << 10


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 8), max_size=40))
def test_an_unordered_run_delivers_every_batch_once(rows: list[int]) -> None:
    with Engine(Writing(), layout(8), workers=0, ordered=False) as engine:
        plans = [np.arange(count) + 100 * number for number, count in enumerate(rows)]
        assert [batch.items.tolist() for batch in engine.run(plans)] == [plan.tolist() for plan in plans]


@pytest.mark.slow
def test_a_slow_batch_holds_up_no_other_where_order_does_not_matter(tmp_path: Path) -> None:
    slow = Writing({0: partial(_until_told, tmp_path)})
    with Engine(slow, layout(1), workers=2, slots=4, ordered=False) as engine:
        seen = []
        for batch in engine.run([[number] for number in range(50)]):
            seen += batch.items.tolist()
            if len(seen) == 48:  # one may have been leased to the waiting worker
                (tmp_path / "go").touch()

    assert sorted(seen) == list(range(50))
    assert 0 not in seen[:48]


def _until_told(folder: Path, item: int) -> None:
    while not (folder / "go").exists():
        time.sleep(0.005)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_plan_that_is_not_ready_holds_up_no_batch_before_it(workers: int) -> None:
    ready = [threading.Event() for _ in range(5)]
    filled: list[int] = []

    def plans() -> Iterator[Plan]:
        for number, event in enumerate(ready):
            while not event.is_set():
                yield NotReady(partial(event.wait, 60))
            yield BatchRequest(np.full(2, number), filled=partial(filled.append, number))

    ready[0].set()
    ready[1].set()
    with Engine(Writing(), layout(2), workers=workers, slots=4) as engine:
        for number, batch in enumerate(engine.run(plans())):
            assert (batch.arrays["number"] == number).all()
            assert filled[: number + 1] == list(range(number + 1))
            assert len(filled) <= max(2, number + 1)
            ready[min(number + 1, 4)].set()
    assert filled == list(range(5))
