"""Stages on several devices: each replica gets its part of every batch, also for uneven rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders import Loader, LocalShuffle
from shardprep.loaders.tf_inputs import QueueInput, StagingInput, original_errors
from support.loader_workers import OwnError, Tagging
from support.sampling import torture_except
from support.tf_devices import tf
from support.tf_members import (
    Aside,
    Numbered,
    Stop,
    assert_whole,
    by_iteration,
    forever,
    until_the_end,
    woken_by_closing,
)

REPLICAS = [2, 3]


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


@pytest.mark.parametrize("depth", torture_except([1, 2, 3], 2))
@pytest.mark.parametrize("replicas", REPLICAS)
def test_each_replica_dequeues_its_part_of_every_batch(replicas: int, depth: int) -> None:
    strategy = mirrored(replicas)
    source = Numbered(last=1)
    with StagingInput(QueueInput(source), strategy=strategy, depth=depth) as each:
        step = taking(strategy, each)
        for source.last in (1, 2, 3, 1):  # the epoch after the next, because a graph's epoch begins at once
            epoch = until_the_end(step)
            assert [n for batch in epoch for n in batch][:15] == list(range(15))
            assert len(epoch) == 6
        assert each.stats().epochs == 4


@pytest.mark.parametrize("replicas", REPLICAS)
def test_iterating_gives_values_for_the_strategys_run(replicas: int) -> None:
    strategy = mirrored(replicas)
    source = Numbered(rows=7, last=1)
    with StagingInput(source, strategy=strategy, depth=2) as each:
        step = step_with_arguments(strategy)
        for _ in range(3):
            assert np.concatenate([step(batch) for batch in each]).tolist() == source.numbers()
        for batch in each:
            parts = parts_of(strategy, batch[1])
            assert [len(part) for part in parts] in (
                [[4, 3], [1, 0]] if replicas == 2 else [[3, 2, 2], [1, 0, 0]]
            )
            devices = [part.device for part in strategy.experimental_local_results(batch[0])]
            assert [device[-5:] for device in devices] == [f"CPU:{number}" for number in range(replicas)]
            assert strategy.experimental_local_results(batch[0])[1].shape[1:] == [2]


def test_a_loaders_records_come_exactly_once_over_replicas(lmdb_shards: Path) -> None:
    strategy = mirrored(2)
    with (
        Loader(
            lmdb_shards,
            batch_size=25,
            transform=Tagging(),
            shuffle=LocalShuffle(60),
            workers=1,
            with_numbers=True,
            drop_last=False,
        ) as loader,
        StagingInput(QueueInput(loader), strategy=strategy, depth=2) as each,
    ):
        step = step_with_arguments(strategy)
        for _ in range(2):
            assert sorted(np.concatenate([step(batch) for batch in each]).tolist()) == list(range(204))
            loader.receipt().check(204)
        in_graph = taking(strategy, each)
        for _ in range(2):
            assert sorted(n for batch in until_the_end(in_graph) for n in batch) == list(range(204))


@pytest.mark.parametrize("replicas", REPLICAS)
def test_an_epoch_may_be_left_at_any_step(replicas: int) -> None:
    strategy = mirrored(replicas)
    source = Numbered()
    with StagingInput(QueueInput(source), strategy=strategy, depth=2) as each:
        step = step_with_arguments(strategy)
        for steps in (0, 1, 5, 6):
            for _, batch in zip(range(steps), each, strict=False):
                step(batch)
            assert np.concatenate([step(batch) for batch in each]).tolist() == source.numbers()
        in_graph = taking(strategy, each)
        for steps in (0, 1, 5, 6):
            until_the_end(in_graph, steps)
            each.reset()
            assert [n for batch in until_the_end(in_graph) for n in batch] == source.numbers()


def test_a_reduction_over_replicas_is_that_of_the_batch() -> None:
    strategy = mirrored(3)
    source = Numbered(last=3)
    with StagingInput(source, strategy=strategy) as each:

        @tf.function
        def step() -> Any:
            def replica() -> Any:
                return tf.reduce_sum(each.dequeue()[1])

            return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(replica), axis=None)

        assert sum(int(total) for total in until_the_end(step)) == sum(source.numbers())


@pytest.mark.parametrize("way", ["iteration", "graph"])
def test_an_error_reaches_the_replicas_after_all_batches_before_it(way: str) -> None:
    def fail(step: int) -> None:
        if step == 4:
            raise OwnError("at 4")

    strategy = mirrored(3)
    source = Numbered(before=fail)
    with StagingInput(QueueInput(source), strategy=strategy, depth=2) as each:
        step = taking(strategy, each) if way == "graph" else None
        for _ in range(3):
            got: list[Any] = []
            with pytest.raises(OwnError, match="at 4"), original_errors():
                got.extend(forever(step) if step else (parts_of(strategy, batch[1]) for batch in each))
            assert [n for parts in got for part in parts for n in np.atleast_1d(part)] == source.numbers()[
                :12
            ]
        source.before = lambda step: None
        each.reset()  # the failure may be earlier, because a graph's next epoch begins at once
        whole = until_the_end(step) if step else [parts_of(strategy, batch[1]) for batch in each]
        assert len(whole) == 6


@pytest.mark.parametrize("way", ["iteration", "graph"])
def test_closing_wakes_waiting_replicas(way: str) -> None:
    strategy = mirrored(2)
    stop = Stop()
    each = StagingInput(QueueInput(stop.source()), strategy=strategy)
    error = woken_by_closing(each, taking(strategy, each) if way == "graph" else each.dequeue, stop)

    assert isinstance(error, tf.errors.OutOfRangeError if way == "graph" else UsageError)


@pytest.mark.parametrize("steps", torture_except([0, 1, 3], 1))
def test_a_full_stage_may_be_closed_while_a_graph_takes(steps: int) -> None:
    for _ in range(5):
        with StagingInput(QueueInput(Numbered(batches=100, last=3)), depth=2) as each:

            @tf.function
            def step(each: StagingInput = each) -> Any:
                return each.dequeue()

            step.get_concrete_function()
            for _ in range(steps):
                step()
            taking_all = Aside(lambda step=step: until_the_end(step))
            time.sleep(0.01)
            each.close()
            taking_all.join()
            assert taking_all.error is None


def test_what_a_failed_step_left_does_not_reach_the_next_epoch() -> None:
    source = Numbered(last=3)
    with StagingInput(QueueInput(source), depth=1) as each:

        @tf.function
        def step(size: Any) -> Any:
            tensors = each.dequeue()
            return tensors, tf.reshape(
                tf.range(6), [size, -1]
            )  # fails in parallel with the dequeueing, not after it

        for _ in range(10):
            with pytest.raises(tf.errors.InvalidArgumentError):
                step(tf.constant(5))
            each.reset()
            assert_whole(source, [batch for batch, _ in until_the_end(lambda: step(tf.constant(2)))])


def test_a_device_may_be_chosen() -> None:
    source = Numbered()
    with StagingInput(source, device="CPU:2", depth=2) as each:
        for values, _ in each:
            assert values.device.endswith("CPU:2")
        assert_whole(source, by_iteration(each)())


def test_scalars_and_strings_go_to_every_replica() -> None:
    strategy = mirrored(2)
    batches = [(np.float32(n), [b"a", b"b", b"c"], np.arange(3)) for n in range(3)]
    with StagingInput(batches, strategy=strategy) as each:
        for n, (scalar, strings, numbers) in enumerate(each):
            assert [float(part) for part in parts_of(strategy, scalar)] == [n, n]
            assert [part.tolist() for part in parts_of(strategy, strings)] == [[b"a", b"b"], [b"c"]]
            assert [part.tolist() for part in parts_of(strategy, numbers)] == [[0, 1], [2]]


def test_a_dict_of_batches_stays_a_dict_for_replicas() -> None:
    strategy = mirrored(2)
    with StagingInput([{"n": np.arange(4)}] * 2, strategy=strategy) as each:
        assert [batch.keys() for batch in each] == [{"n"}] * 2


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"depth": 0}, "depth"),
    ({"depth": -1}, "depth"),
    ({"device": "CPU:1", "strategy": True}, "device"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_invalid_options_are_an_error_at_once(options: dict[str, Any], message: str) -> None:
    if "strategy" in options:
        options = options | {"strategy": mirrored(2)}
    with pytest.raises(UsageError, match=message):
        StagingInput([np.zeros(3)], **options)


def test_what_lies_on_several_devices_is_no_dataset() -> None:
    with StagingInput([np.zeros(4)], strategy=mirrored(2)) as each:
        with pytest.raises(UsageError, match="cannot be a dataset"):
            each.to_dataset()

        @tf.function
        def step() -> Any:
            return each.dequeue()

        with pytest.raises(Exception, match=r"UsageError: .*strategy\.run"):
            step()


@pytest.mark.torture
@pytest.mark.parametrize("replicas", REPLICAS)
def test_replicas_agree_on_the_end_of_very_many_epochs(replicas: int) -> None:
    strategy = mirrored(replicas)
    source = Numbered(batches=2)
    with StagingInput(QueueInput(source), strategy=strategy, depth=2) as each:
        step = taking(strategy, each)
        for _ in range(1000):
            assert [n for batch in until_the_end(step) for n in batch] == source.numbers()
