"""Datasets, sessions and functions around an input: distribution, ends, errors, and refused copies."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders import Loader
from shardprep.loaders.frameworks.tf_graph import SinkClosed, StagingAreas, Status
from shardprep.loaders.tf_inputs import (
    DatasetInput,
    DummyConstantInput,
    FeedInput,
    InputMonitor,
    QueueInput,
    StagingInput,
    TensorInput,
    original_errors,
    to_dataset,
)
from support.loaded import loader_on
from support.loader_workers import Tagging
from support.tf_devices import tf
from support.tf_members import Stop, first, until_the_end, woken_by_closing


def mirrored(replicas: int) -> Any:
    return tf.distribute.MirroredStrategy([f"CPU:{number}" for number in range(replicas)])


def parts_of(strategy: Any, value: Any) -> list[Any]:
    return [np.array(part) for part in strategy.experimental_local_results(value)]


def step_with_arguments(strategy: Any) -> Callable[[Any], Any]:
    """A step that gets the batch as its arguments; returns the numbers of all replicas."""

    @tf.function(reduce_retracing=True)
    def step(values: Any, *rest: Any) -> Any:
        def replica(values: Any, *rest: Any) -> Any:
            return tf.reduce_sum(values), rest[-1]

        return strategy.run(replica, args=(values, *rest))

    return lambda batch: np.concatenate(parts_of(strategy, step(*batch)[1]))


@pytest.mark.torture
@pytest.mark.parametrize("replicas", [2, 3])
def test_a_strategy_distributes_it_exactly(replicas: int, lmdb_shards: Path) -> None:
    strategy = mirrored(replicas)
    with loader_on(lmdb_shards, batch_size=20, workers=1) as loader:
        distributed = strategy.experimental_distribute_dataset(to_dataset(loader))
        step = step_with_arguments(strategy)
        for _ in range(2):
            assert sorted(np.concatenate([step(batch) for batch in distributed]).tolist()) == list(range(204))
            loader.receipt().check(204)


def test_an_infinite_dataset_has_no_end_of_epoch() -> None:
    with DatasetInput(tf.data.Dataset.range(3).repeat()) as each:
        assert each.batches_per_epoch is None
        assert [int(np.array(n)) for n in first(each, 7)] == [0, 1, 2, 0, 1, 2, 0]


def test_tensorflows_own_errors_stay_what_they_are() -> None:
    with pytest.raises(tf.errors.InvalidArgumentError), original_errors():
        tf.reshape(tf.range(5), [2, 2])
    with pytest.raises(ZeroDivisionError), original_errors():
        raise ZeroDivisionError


def test_a_maker_that_stops_is_an_error_and_no_short_epoch() -> None:
    values = iter([tf.zeros([2])] * 4)
    with TensorInput(lambda: next(values), length=10) as made, pytest.raises(RuntimeError):
        list(made)


def test_an_input_belongs_to_one_session() -> None:
    with tf.Graph().as_default(), QueueInput([np.arange(3)]) as batches:
        batches.dequeue()
        with tf.compat.v1.Session() as session:
            batches.start(session)
        for other in (session, tf.compat.v1.Session()):
            with pytest.raises(UsageError, match="already started; make one for each session"):
                batches.start(other)


@pytest.mark.parametrize(
    ("number", "dtype"), [(300, tf.int8), (2**40, tf.int32), (1.5, tf.int32), (-1, tf.uint8)]
)
def test_numbers_that_do_not_fit_the_signature_are_an_error(number: float, dtype: Any) -> None:
    with (
        QueueInput([([number],)], signature=(tf.TensorSpec([1], dtype),)) as batches,
        pytest.raises(UsageError, match="signature"),
    ):
        list(batches)


def test_iterating_while_a_function_is_traced_is_an_error_that_says_what_to_do() -> None:
    with QueueInput([np.zeros(2)]) as batches, pytest.raises(UsageError, match="call dequeue"):
        tf.function(lambda: next(iter(batches)), autograph=False)()


def test_a_dataset_that_is_iterated_twice_at_once_says_so() -> None:
    dataset = to_dataset([np.arange(2)] * 6)
    with pytest.raises(UsageError, match="another iteration"), original_errors():
        list(tf.data.Dataset.zip((dataset, dataset)))


def test_a_stage_and_its_dataset_know_the_loaders_state(lmdb_shards: Any) -> None:
    with (
        Loader(lmdb_shards, batch_size=4, transform=Tagging(), workers=1, rank=0, world_size=1) as loader,
        StagingInput(FeedInput(loader)) as batches,
    ):
        for epoch in (iter(batches), iter(batches.to_dataset())):
            next(epoch)
            time.sleep(0.05)  # the dataset draws no batch ahead
            assert batches.state_dict()["place"] == 4


def taking(strategy: Any, each: StagingInput) -> Callable[[], Any]:
    """A step in which each replica dequeues its own part; returns the numbers of all replicas."""

    @tf.function
    def step() -> Any:
        def replica() -> Any:
            values, *_, numbers = each.dequeue()
            return tf.cast(tf.reduce_sum(tf.cast(values, tf.float64)), tf.float32), numbers

        return strategy.run(replica)

    return lambda: tuple(np.concatenate(parts_of(strategy, step()[1])))


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


def test_a_device_without_memory_for_an_element_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def stage(*given: object) -> None:
        raise tf.errors.ResourceExhaustedError(None, None, "out of memory")

    with StagingInput([np.zeros(3)]) as each:
        (area,) = each._sink._areas
        monkeypatch.setattr(area, "stage", stage)
        with pytest.raises(tf.errors.ResourceExhaustedError):
            next(iter(each))


def test_invalid_options_are_an_error_at_once() -> None:
    for options in ({"depth": 0}, {"depth": -1}, {"device": "CPU:1", "strategy": mirrored(2)}):
        with pytest.raises(UsageError, match=r"depth|device"):
            StagingInput([np.zeros(3)], **options)
    for monitored, says in (({"every": 10}, "a writer"), ({"train": [1]}, "give an input")):
        with pytest.raises(UsageError, match=says):
            InputMonitor(**monitored)
    for call in (lambda: TensorInput(list, length=1.5), lambda: to_dataset([1], prefetch="2")):
        with pytest.raises(UsageError, match=r"(length|prefetch) must be a whole number"):
            call()
    for call, says in (
        (lambda: TensorInput(5), "make must be a function that returns tensors, not 5"),  # type: ignore[arg-type]
        (lambda: DummyConstantInput(tf.TensorSpec([None, 3])), "of known shape"),
    ):
        with pytest.raises(UsageError, match=says):
            call()
    with FeedInput([np.zeros(3)]) as feed, pytest.raises(Exception, match="call dequeue"):
        tf.function(lambda: iter(feed))()
    with TensorInput(lambda: tf.zeros(2)) as endless, pytest.raises(TypeError, match="give it a length"):
        len(endless)
    for wrong in ([1, 2], None, tf.data.Dataset):
        with pytest.raises(UsageError, match=r"tf\.data\.Dataset"):
            DatasetInput(wrong)
    ragged, dense = tf.ragged.constant([[1], [2, 3]]), r"dense.*RaggedTensorSpec"
    dated = [np.zeros(2, "M8[s]")], r"ndarray of dtype datetime64\[s\], which cannot be a tensor"
    for source, says in (([ragged], dense), (tf.data.Dataset.from_tensors(ragged), dense), dated):
        with pytest.raises(UsageError, match=says):
            QueueInput(source)
    for make in (list, FeedInput):
        with tf.Graph().as_default(), pytest.raises(UsageError, match="but no FeedInput"):
            StagingInput(make([np.zeros(3)]))


def test_what_lies_on_several_devices_is_no_dataset() -> None:
    with StagingInput([np.zeros(4)], strategy=mirrored(2)) as each:
        with pytest.raises(UsageError, match="cannot be a dataset"):
            each.to_dataset()
        with pytest.raises(Exception, match=r"UsageError: .*strategy\.run"):
            tf.function(lambda: each.dequeue())()
