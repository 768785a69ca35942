"""Queues between the source and the step: capacity, occupancy, states to resume from, batches of records."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders import Receipt, TrainTransform
from shardprep.loaders.batches.stack import Batches
from shardprep.loaders.tf_inputs import (
    BatchQueueInput,
    DatasetInput,
    FeedInput,
    Input,
    QueueInput,
    to_dataset,
)
from support.loaded import assert_same, epoch_of, loader_on
from support.sampling import torture_except
from support.tf_devices import tf
from support.tf_members import (
    TIMEOUT_S,
    Made,
    Numbered,
    Rows,
    arrays,
    assert_whole,
    by_dataset,
    first,
    gather,
    members,
    numbers_of,
    staging,
    staging_over_queue,
    stepping,
    until_the_end,
)

STATEFUL: dict[str, Made] = {
    "queue": QueueInput,
    "staging": staging(3),
    "staging over queue": staging_over_queue,
}


def stateful() -> Any:
    return members(STATEFUL, quick=("staging over queue",))


def filled(each: Input) -> None:
    """Wait until the queue is full."""
    deadline = time.monotonic() + TIMEOUT_S
    while each.stats().level < each.stats().capacity:
        assert time.monotonic() < deadline
        time.sleep(0.005)


@stateful()
def test_a_state_is_of_the_batch_that_came_out_last(make: Made, lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards) as loader:
        whole = epoch_of(loader)
        loader.set_epoch(0)
        states = []
        with make(loader) as each:
            states.append(each.state_dict())  # type: ignore[attr-defined]
            for _ in each:
                states.append(json.loads(json.dumps(each.state_dict())))  # type: ignore[attr-defined]
            after = each.state_dict()  # type: ignore[attr-defined]

    assert [(state["epoch"], state["place"]) for state in states[:-1]] == [(0, n * 10) for n in range(21)]
    assert [(s["epoch"], s["place"]) for s in (states[-1], after)] == [(1, 0), (1, 0)]
    for step in (0, 1, 9, 20):
        with loader_on(lmdb_shards, workers=step % 2) as loader, make(loader) as each:
            each.load_state_dict(states[step])  # type: ignore[attr-defined]
            assert_same([arrays(batch) for batch in each], whole[step:])
            loader.receipt().check(204)


@stateful()
def test_going_on_in_the_same_input_is_exact(make: Made, lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards) as loader:
        whole, following = epoch_of(loader), epoch_of(loader)
        loader.set_epoch(0)
        with make(loader) as each:
            got = first(each, 4)
            each.load_state_dict(each.state_dict())  # type: ignore[attr-defined]
            got += first(each, 3)
            each.load_state_dict(each.state_dict())  # type: ignore[attr-defined]
            got += until_the_end(each.dequeue, 2)
            each.load_state_dict(each.state_dict())  # type: ignore[attr-defined]
            assert_same(got + [arrays(batch) for batch in each], whole)
            assert_same([arrays(batch) for batch in each], following)


@stateful()
def test_an_epoch_that_was_begun_has_its_own_state(make: Made, lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards) as loader, make(loader) as each:
        first(each, 4)
        iterator = iter(each)
        state = each.state_dict()  # type: ignore[attr-defined]
        assert (state["epoch"], state["place"]) == (1, 0)
        next(iterator)
        assert each.state_dict()["place"] == 10  # type: ignore[attr-defined]


@stateful()
def test_an_epoch_that_was_begun_may_be_left_before_its_first_batch(make: Made, lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards) as loader, make(loader) as each:
        for leave in (each.reset, lambda: each.load_state_dict(each.state_dict())):  # type: ignore[attr-defined]
            iter(each)
            leave()
            assert numbers_of([arrays(batch) for batch in each]) != []
            loader.receipt().check(204)


@stateful()
def test_a_state_stays_readable_after_closing(make: Made, lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards) as loader:
        with make(loader) as each:
            first(each, 4)
        assert each.state_dict()["place"] == 40  # type: ignore[attr-defined]


@stateful()
def test_a_graphs_state_and_a_sources_without_any_are_errors(make: Made, lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards) as loader, make(loader) as each:
        state = each.state_dict()  # type: ignore[attr-defined]
        stepping(each)()
        for call in (each.state_dict, lambda: each.load_state_dict(state)):  # type: ignore[attr-defined]
            with pytest.raises(UsageError, match="not counted"):
                call()
    with make(Numbered()) as each:
        with pytest.raises(UsageError, match="no state"):
            each.state_dict()  # type: ignore[attr-defined]
        with pytest.raises(UsageError, match="no state"):
            each.load_state_dict(None)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("capacity", "batches"), [(None, 2), (1, 1), (np.int64(5), 5), ("1KB", 20), ("1KiB", 21), ("0.001KB", 1)]
)
def test_a_capacity_is_of_batches_or_bytes(capacity: Any, batches: int) -> None:
    source = Numbered(batches=100, rows=3, last=3)  # 48 bytes in a batch
    with QueueInput(source, capacity=capacity) as each:
        assert each.stats().capacity == batches
        iterator = iter(each)
        filled(each)
        time.sleep(0.05)
        assert each.stats().level == batches
        next(iterator)


def test_a_capacity_in_bytes_of_a_given_signature_draws_no_batch() -> None:
    source = Numbered()
    fixed = (tf.TensorSpec([3, 2], tf.float32), tf.TensorSpec([3], tf.int64))
    with QueueInput(source, signature=fixed, capacity="480B") as each:
        assert each.stats().capacity == 10
        assert source.passes == 0


def test_a_capacity_in_bytes_of_a_loader_is_of_its_full_batches(lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards, transform=TrainTransform(32)) as loader:
        assert loader.batch_bytes == 10 * (32 * 32 * 3 + 16)
        with QueueInput(loader, capacity="1MiB") as each:
            assert each.stats().capacity == 33
    with loader_on(lmdb_shards, transform=None) as loader, pytest.raises(UsageError, match="fixed size"):
        QueueInput(loader, capacity="1MiB")


@pytest.mark.parametrize("capacity", [0, -1, True, 1.5, "many", "0KB ", [2]])
def test_an_invalid_capacity_is_an_error_at_once(capacity: Any) -> None:
    with pytest.raises(UsageError):
        QueueInput([np.zeros(3)], capacity=capacity)


@pytest.mark.parametrize("way", torture_except(["python", "graph"], "graph"))
@stateful()
def test_a_slow_step_finds_its_batches_and_the_source_waits(make: Made, way: str) -> None:
    with make(Numbered(batches=100, last=3)) as each:
        step = each.dequeue if way == "python" else stepping(each)
        for _ in range(30):
            step()
            filled(each)
            time.sleep(0.005)  # time for the feeder to see that
        stats = each.stats()

    assert stats.starved < 0.2
    assert stats.starved_seconds < stats.blocked_seconds
    assert stats.mean_level > 0.5 * (stats.capacity - 1)
    assert stats.blocked > 0.3
    if way == "python":
        assert stats.batches == 30


@pytest.mark.parametrize("way", torture_except(["python", "graph"], "graph"))
@stateful()
def test_a_slow_source_starves_its_step(make: Made, way: str) -> None:
    with make(Numbered(batches=20, last=3, before=lambda step: time.sleep(0.04))) as each:
        step = each.dequeue if way == "python" else stepping(each)
        until_the_end(step)
        stats = each.stats()

    assert stats.starved > 0.8
    assert stats.blocked < 0.2
    assert stats.mean_level < 0.5
    assert stats.epochs == 1
    assert stats.batches in (20, 21)  # a graph's next epoch begins at once
    if way == "python":
        assert stats.starved_seconds > 10 * stats.blocked_seconds


def test_inputs_that_hold_nothing_back_count_too() -> None:
    source = Numbered()
    with FeedInput(source) as feed, DatasetInput(to_dataset(source)) as dataset:
        for each in (feed, dataset):
            list(each)
            stats = each.stats()
            assert (stats.capacity, stats.level, stats.batches, stats.epochs, stats.starved) == (
                0,
                0,
                6,
                1,
                1,
            )
            assert json.loads(json.dumps(stats.to_dict())) == stats.to_dict()


def test_records_are_put_together_in_batches() -> None:
    def records() -> Iterator[Any]:
        for number in range(25):
            yield {"x": np.full(3, number, np.float32), "n": number}

    with BatchQueueInput(records, 10) as each:
        got = [arrays(batch) for batch in each]
        again = [arrays(batch) for batch in each]
    with BatchQueueInput(records, 10, remainder="drop") as each:
        full = [arrays(batch) for batch in each]

    assert [len(batch["n"]) for batch in got] == [10, 10, 5]
    assert [n for batch in got for n in batch["n"]] == list(range(25))
    assert [batch["n"].tolist() for batch in again] == [batch["n"].tolist() for batch in got]
    assert [batch["n"].tolist() for batch in full] == [batch["n"].tolist() for batch in got[:2]]


def test_a_list_of_records_has_a_length() -> None:
    records = [(np.zeros(2, np.float32), n) for n in range(25)]
    with BatchQueueInput(records, 10) as keep, BatchQueueInput(records, 10, remainder="drop") as drop:
        assert (len(keep), keep.batches_per_epoch, int(keep.to_dataset().cardinality())) == (3, 3, 3)
        assert (len(drop), drop.batches_per_epoch, int(drop.to_dataset().cardinality())) == (2, 2, 2)
        assert len(by_dataset(keep)()) == 3
        assert len(by_dataset(drop)()) == 2


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([np.zeros(2), np.zeros(3)], "shapes"),
        ([np.zeros(2), np.zeros(2, int)], "dtypes"),
        ([1, (2,)], "forms"),
    ],
)
def test_records_that_do_not_fit_together_are_an_error(records: list[Any], message: str) -> None:
    with BatchQueueInput([*[records[0]] * 4, *records], 2) as each:
        got: list[Any] = []
        with pytest.raises(UsageError, match=message):
            gather(each, got)
        assert len(got) == 2


def test_assembled_batches_are_not_copied_again() -> None:
    made: list[int] = []

    class Noted(Batches):
        def __iter__(self) -> Iterator[Any]:
            for batch in super().__iter__():
                made.append(batch[0].ctypes.data)
                yield batch

    with QueueInput(Noted(Rows(Numbered(), 3), 3)) as each:
        got = [np.frombuffer(memoryview(values), np.uint8).ctypes.data for values, _ in each]

    assert got == made


@pytest.mark.parametrize("make", [QueueInput, staging_over_queue])
def test_every_record_comes_exactly_once_over_ranks(make: Made, lmdb_shards: Path) -> None:
    receipts, numbers = [], []
    for rank in range(2):
        with loader_on(lmdb_shards, rank=rank, world_size=2) as loader, make(loader) as each:
            numbers += numbers_of([arrays(batch) for batch in each])
            receipts.append(loader.receipt())

    Receipt.merge(receipts).check(204)
    assert sorted(numbers) == list(range(204))


def test_epochs_of_a_graph_begin_by_themselves_and_are_left_by_reset() -> None:
    source = Numbered()
    with QueueInput(source) as each:
        step = stepping(each)
        assert_whole(source, until_the_end(step))
        first_of_second = arrays(step())
        each.reset()
        third = until_the_end(step)

    assert float(first_of_second[0][0, 0]) == 1
    assert float(third[0][0][0, 0]) == 2
    assert_whole(source, third)


def test_a_step_dequeues_within_a_loop_of_tensorflows() -> None:
    source = Numbered(last=3)
    with QueueInput(source) as each:

        @tf.function
        def epoch(steps: Any) -> Any:
            total = tf.constant(0, tf.int64)
            for _ in tf.range(steps):
                _, numbers = each.dequeue()
                total += tf.reduce_sum(numbers)
            return total

        for _ in range(2):
            assert int(epoch(tf.constant(6))) == sum(source.numbers())
            with pytest.raises(tf.errors.OutOfRangeError):
                epoch(tf.constant(1))


def test_a_compiled_step_may_use_what_was_dequeued_outside_of_it() -> None:
    @tf.function(jit_compile=True)
    def total(values: Any, numbers: Any) -> Any:
        return tf.reduce_sum(values), tf.reduce_sum(numbers)

    source = Numbered()
    with QueueInput(source) as each:

        @tf.function
        def step() -> Any:
            return total(*each.dequeue())

        assert sum(int(n) for _, n in until_the_end(step)) == sum(source.numbers())
        assert sum(int(total(*batch)[1]) for batch in each) == sum(source.numbers())


@pytest.mark.parametrize("call", ["iterate", "dequeue", "graph", "dataset"])
def test_a_source_may_be_slow_to_begin(call: str) -> None:
    source = Numbered(before=lambda step: time.sleep(0.2 if step == 0 else 0))
    ways: dict[str, Callable[[Input], Any]] = {
        "iterate": list,
        "dequeue": lambda each: until_the_end(each.dequeue),
        "graph": lambda each: until_the_end(stepping(each)),
        "dataset": lambda each: list(each.to_dataset()),
    }
    with QueueInput(source, signature=(tf.TensorSpec([None, 2]), tf.TensorSpec([None], tf.int64))) as each:
        assert len(ways[call](each)) == 6
