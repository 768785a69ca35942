"""Regression tests from hostile use of the inputs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shardprep.formats.errors import OperationError, UsageError
from shardprep.loaders import Loader
from shardprep.loaders.batches.pickling import aligned
from shardprep.loaders.tf_inputs import (
    BatchQueueInput,
    FeedInput,
    QueueInput,
    StagingInput,
    original_errors,
    to_dataset,
)
from support.loader_workers import Tagging
from support.tf_devices import tf
from support.thread_room import no_room


class Rewinding:
    """An iterator that restarts with every ``iter``."""

    def __iter__(self) -> Rewinding:
        self.place = 0
        return self

    def __next__(self) -> Any:
        self.place += 1
        if self.place > 4:
            raise StopIteration
        return np.full(2, self.place)


@pytest.mark.parametrize("make", [QueueInput, FeedInput, StagingInput, to_dataset])
def test_an_iterator_that_begins_anew_on_iter_is_asked_only_once(make: Any) -> None:
    batches = make(lambda: Rewinding(), signature=tf.TensorSpec([2], tf.int64))
    assert [int(batch[0]) for batch in batches] == [1, 2, 3, 4]


def test_records_of_such_an_iterator_come_once_each() -> None:
    with BatchQueueInput(lambda: Rewinding(), 3) as batches:
        assert [batch.shape[0] for batch in batches] == [3, 1]


@pytest.mark.parametrize("make", [QueueInput, FeedInput, StagingInput, to_dataset])
def test_a_source_that_fills_one_array_again_and_again_is_not_torn(make: Any) -> None:
    def refilling() -> Iterator[Any]:
        memory = aligned(64).view(np.int64)
        for number in range(8):
            memory[:] = number
            yield memory

    kept = list(make(refilling, signature=tf.TensorSpec([8], tf.int64)))

    assert [int(batch[0]) for batch in kept] == list(range(8))


@pytest.mark.parametrize("make", [QueueInput, StagingInput])
def test_an_input_collected_while_a_graph_is_built_leaves_nothing_in_it(make: Any) -> None:
    dropped: list[Any] = [make([np.zeros(2)] * 5)]
    next(iter(dropped[0]))
    dropped.append(dropped)
    del dropped

    @tf.function
    def innocent(x: Any) -> Any:
        gc.collect()
        return x + 1

    graph = innocent.get_concrete_function(tf.constant(1)).graph

    assert not [op.type for op in graph.get_operations() if "Queue" in op.type or "Stage" in op.type]


def test_one_thread_for_all_operations_is_enough_for_several_epochs() -> None:
    with tf.Graph().as_default(), QueueInput([np.arange(3)] * 4) as batches:
        batch = batches.dequeue()
        config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=1, intra_op_parallelism_threads=1)
        with tf.compat.v1.Session(config=config) as session:
            batches.start(session)
            for _ in range(3):
                for _ in range(4):
                    session.run(batch)
                with pytest.raises(tf.errors.OutOfRangeError):
                    session.run(batch)


def test_an_input_belongs_to_one_session() -> None:
    with tf.Graph().as_default(), QueueInput([np.arange(3)]) as batches:
        batches.dequeue()
        with tf.compat.v1.Session() as session:
            batches.start(session)
        with tf.compat.v1.Session() as other, pytest.raises(UsageError, match="another session"):
            batches.start(other)


def test_slots_come_back_from_a_stage_that_was_left_and_closed(lmdb_shards: Any) -> None:
    with Loader(
        lmdb_shards, batch_size=4, transform=Tagging(), workers=1, rank=0, world_size=1, slots=5
    ) as loader:
        for _ in range(10):  # a slot lost in each would have the loader copy, and warn
            with StagingInput(loader) as batches:
                next(iter(batches))
        assert loader.stats().copied == 0


@pytest.mark.parametrize(
    ("number", "dtype"), [(300, tf.int8), (2**40, tf.int32), (1.5, tf.int32), (-1, tf.uint8)]
)
def test_numbers_that_do_not_fit_the_signature_are_an_error(number: float, dtype: Any) -> None:
    with (
        QueueInput([([number],)], signature=(tf.TensorSpec([1], dtype),)) as batches,
        pytest.raises(UsageError, match="signature"),
    ):
        list(batches)


@pytest.mark.parametrize("source", ["shards/train", b"bytes", {"x": np.zeros(3)}, 5])
def test_an_invalid_source_is_refused(source: Any) -> None:
    with pytest.raises(UsageError, match="batches come from"):
        QueueInput(source)


def test_iterating_while_a_function_is_traced_is_an_error_that_says_what_to_do() -> None:
    with QueueInput([np.zeros(2)]) as batches:

        @tf.function(autograph=False)
        def step() -> Any:
            return next(iter(batches))

        with pytest.raises(UsageError, match="call dequeue"):
            step()


def test_a_dataset_that_is_iterated_twice_at_once_says_so() -> None:
    dataset = to_dataset([np.arange(2)] * 6, prefetch=0)
    with pytest.raises(UsageError, match="another iteration"), original_errors():
        list(tf.data.Dataset.zip((dataset, dataset)))


def test_a_stage_over_an_input_without_a_thread_knows_the_loaders_state(lmdb_shards: Any) -> None:
    with (
        Loader(lmdb_shards, batch_size=4, transform=Tagging(), workers=1, rank=0, world_size=1) as loader,
        StagingInput(FeedInput(loader)) as batches,
    ):
        next(iter(batches))
        assert batches.state_dict()["place"] == 4


@pytest.mark.parametrize("make", [QueueInput, StagingInput])
def test_an_input_without_room_for_its_thread_says_so_and_works_once_there_is(make: Any) -> None:
    with make([np.zeros(3)] * 4) as fed:
        with no_room(), pytest.raises(OperationError, match="no room for another thread"):
            next(iter(fed))

        assert sum(1 for _ in fed) == 4
