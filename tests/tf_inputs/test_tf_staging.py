"""Stages on several devices: each replica gets its part of every batch, also for uneven rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders.frameworks.tf_graph import SinkClosed, StagingAreas, Status
from shardprep.loaders.tf_inputs import QueueInput, StagingInput
from support.loaded import loader_on
from support.tf_devices import tf
from support.tf_members import Stop, until_the_end, woken_by_closing


def mirrored(replicas: int) -> Any:
    return tf.distribute.MirroredStrategy([f"CPU:{number}" for number in range(replicas)])


def parts_of(strategy: Any, value: Any) -> list[Any]:
    return [np.array(part) for part in strategy.experimental_local_results(value)]


def taking(strategy: Any, each: StagingInput) -> Callable[[], Any]:
    """A step in which each replica dequeues its own part; returns the numbers of all replicas."""

    @tf.function
    def step() -> Any:
        def replica() -> Any:
            values, *_, numbers = each.dequeue()
            return tf.cast(tf.reduce_sum(tf.cast(values, tf.float64)), tf.float32), numbers

        return strategy.run(replica)

    return lambda: tuple(np.concatenate(parts_of(strategy, step()[1])))


def step_with_arguments(strategy: Any) -> Callable[[Any], Any]:
    """A step that gets the batch as its arguments; returns the numbers of all replicas."""

    @tf.function(reduce_retracing=True)
    def step(values: Any, *rest: Any) -> Any:
        def replica(values: Any, *rest: Any) -> Any:
            return tf.reduce_sum(values), rest[-1]

        return strategy.run(replica, args=(values, *rest))

    return lambda batch: np.concatenate(parts_of(strategy, step(*batch)[1]))


def test_a_loaders_records_come_exactly_once_over_replicas(lmdb_shards: Path) -> None:
    strategy = mirrored(2)
    with (
        loader_on(lmdb_shards, batch_size=25, workers=1) as loader,
        StagingInput(QueueInput(loader), strategy=strategy, depth=2) as each,
    ):
        step = step_with_arguments(strategy)
        for _ in range(2):
            assert sorted(np.concatenate([step(batch) for batch in each]).tolist()) == list(range(204))
            loader.receipt().check(204)
        in_graph = taking(strategy, each)
        for _ in range(2):
            assert sorted(n for batch in until_the_end(in_graph) for n in batch) == list(range(204))


@pytest.mark.parametrize("way", ["iteration", "graph"])
def test_closing_wakes_waiting_replicas(way: str) -> None:
    strategy = mirrored(2)
    stop = Stop()
    each = StagingInput(QueueInput(stop.source()), strategy=strategy)
    error = woken_by_closing(each, taking(strategy, each) if way == "graph" else each.dequeue, stop)

    assert isinstance(error, tf.errors.OutOfRangeError if way == "graph" else UsageError)


def test_a_step_that_has_its_token_gets_its_part_of_a_stage_that_is_closed_meanwhile() -> None:
    stage = StagingAreas([tf.TensorSpec([2], tf.float32)], ["/CPU:0"], 2)
    stage.put(Status.BATCH, [[tf.ones([2])]])
    (area,) = stage._areas
    area.tokens.dequeue()
    stage.close()

    (part,) = area.unstage()
    assert part.numpy().tolist() == [1, 1]
    with pytest.raises(SinkClosed):
        stage.put(Status.BATCH, [[tf.ones([2])]])


def test_invalid_options_are_an_error_at_once() -> None:
    for options in ({"depth": 0}, {"depth": -1}, {"device": "CPU:1", "strategy": mirrored(2)}):
        with pytest.raises(UsageError, match=r"depth|device"):
            StagingInput([np.zeros(3)], **options)
    with tf.Graph().as_default(), pytest.raises(UsageError, match="wraps another input"):
        StagingInput([np.zeros(3)])


def test_what_lies_on_several_devices_is_no_dataset() -> None:
    with StagingInput([np.zeros(4)], strategy=mirrored(2)) as each:
        with pytest.raises(UsageError, match="cannot be a dataset"):
            each.to_dataset()

        @tf.function
        def step() -> Any:
            return each.dequeue()

        with pytest.raises(Exception, match=r"UsageError: .*strategy\.run"):
            step()
