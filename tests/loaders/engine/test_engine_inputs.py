"""Inputs that an engine sends beside its items, and batches that come as they are finished."""

from __future__ import annotations

import multiprocessing
import os
import signal
from typing import Any

import numpy as np
import pytest

from shardprep.loaders.batches.pickling import PickledValue
from shardprep.loaders.batches.slots import SlotLayout
from shardprep.loaders.engine.dispatcher import BatchRequest
from shardprep.loaders.engine.engine import Engine
from support.engine_workers import PLACE, Receiving

MIB = 1 << 20


def shipment(*values: object) -> BatchRequest:
    places, inputs, at = [], [], 0
    for value in values:
        piece = PickledValue.of(value)
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
