"""Queues between the source and the step: capacity, occupancy, states to resume from, and verdicts."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders import Loader, TrainTransform, TransformInput
from shardprep.loaders.frames import FrameReceiver, SenderFailed, send_batches
from shardprep.loaders.loader.stats import Verdict
from shardprep.loaders.prometheus import StatsCollector
from shardprep.loaders.tf_inputs import (
    DatasetInput,
    FeedInput,
    QueueInput,
    TensorInput,
    ZMQInput,
    original_errors,
    to_dataset,
)
from support.loaded import loader_on, numbers_in
from support.loader_workers import OwnError
from support.remote_ends import ANY_PORT
from support.tf_devices import tf
from support.tf_members import (
    FED,
    TIMEOUT_S,
    WHOLE,
    Made,
    Numbered,
    arrays,
    members,
    staging_over_queue,
    stepping,
    until_the_end,
)
from support.verdict_workers import Nothing

stateful = members({name: FED[name] for name in FED if name != "batch-queue"}, quick=("staging-over-queue",))


@stateful
def test_an_epoch_that_was_begun_may_be_left_before_its_first_batch(make: Made, lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards) as loader, make(loader) as each:
        for leave in (each.reset, lambda: each.load_state_dict(each.state_dict())):  # type: ignore[attr-defined]
            iter(each)
            leave()
            assert numbers_in([arrays(batch) for batch in each]) != []
            loader.receipt().check(204)


class NeverBegun:
    """A source with a state, of which no pass can begin."""

    def __iter__(self) -> Iterator[Any]:
        raise OwnError

    def state_dict(self) -> int:
        return 7


def test_a_pass_that_cannot_begin_has_the_state_of_its_source() -> None:
    with QueueInput(NeverBegun(), signature=tf.TensorSpec([None])) as each:
        iter(each)
        assert each.state_dict() == 7


@stateful
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


def image(record: TransformInput, rng: np.random.Generator) -> Any:
    return np.full((4, 5, 3), record.label, np.float32)


@pytest.mark.parametrize(
    ("transform", "row"),
    [(TrainTransform(32), 32 * 32 * 3), (image, 4 * 5 * 3 * 4)],
    ids=["declared", "found"],
)
def test_a_capacity_in_bytes_of_a_loader_is_of_its_full_batches(
    lmdb_shards: Path, transform: Any, row: int
) -> None:
    with loader_on(lmdb_shards, transform=transform) as loader:
        with QueueInput(loader, capacity=f"{3 * 10 * (row + 16)} B") as each:
            assert each.stats().capacity == 3
            assert len(numbers_in([arrays(batch) for batch in each])) == 204
        assert loader.batch_bytes == 10 * (row + 16) or transform is image


@pytest.mark.parametrize(
    ("transform", "says"),
    [(None, "fixed size"), (lambda record, rng: np.zeros(rng.integers(1, 9)), "pad or crop .* to one shape")],
)
def test_batches_of_no_fixed_size_have_no_capacity_in_bytes(
    lmdb_shards: Path, transform: Any, says: str
) -> None:
    with loader_on(lmdb_shards, transform=transform) as loader, pytest.raises(UsageError, match=says):
        QueueInput(loader, capacity="1MiB")


def test_inputs_that_hold_nothing_back_count_too() -> None:
    source = Numbered()
    with FeedInput(source) as feed, DatasetInput(to_dataset(source)) as dataset:
        for each in (feed, dataset):
            list(each)
            stats = each.stats()
            assert (stats.capacity, stats.level, stats.batches) == (0, 0, 6)
            assert (stats.epochs, stats.starved) == (1, 1)
            assert json.loads(json.dumps(stats.to_dict())) == stats.to_dict()
            metrics = {metric.name: metric.samples for metric in StatsCollector(train=each).collect()}
            assert metrics["shardprep_starved_seconds"][0].value == stats.waited


def slow_batches(batches: int = 12) -> Iterator[Any]:
    for number in range(batches):
        time.sleep(0.005)
        yield np.zeros((4, 8), np.uint8), np.full(4, number)


UNKNOWN = "the source is slow; where it spends its time is unknown here"


class Timed:
    """A slow source that has stats with a verdict."""

    verdict = Verdict("map(crop)", 200.0, "", float("inf"), "more processes help", "items")

    def __iter__(self) -> Iterator[Any]:
        return slow_batches()

    def stats(self) -> Timed:
        return self


@pytest.mark.parametrize("name", ["feed", "queue", "staging-over-queue"])
def test_what_a_source_knows_of_its_limit_is_told(name: str) -> None:
    with WHOLE[name](Timed()) as batches:
        assert len(list(batches)) == 12
        stats = batches.stats()

    assert stats.verdict
    assert (stats.verdict.limit, stats.verdict.unit) == ("map(crop)", "batches")
    assert "more processes help" in str(stats)
    json.dumps(stats.to_dict())


@pytest.mark.torture
def test_a_slow_step_in_a_graph_is_named_and_stats_have_every_stage_as_json(lmdb_shards: Path) -> None:
    with (
        Loader(lmdb_shards, batch_size=4, transform=Nothing(), workers=2) as loader,
        staging_over_queue(loader) as batches,
    ):

        @tf.function
        def step() -> Any:
            _, labels = batches.dequeue()
            with tf.control_dependencies([tf.py_function(lambda: time.sleep(0.02), [], [])]):
                return tf.reduce_sum(labels)

        for _ in range(12):
            step()
        found = batches.stats().to_dict()

    assert json.loads(json.dumps(found))["verdict"] == found["verdict"]
    assert found["verdict"]["limit"] == "training step"
    stages = [found["load"]["name"], found["source"]["load"]["name"]]
    stages += [load["name"] for load in found["source"]["loader"]["loads"]]
    workers, main = ["read", "decode", "augment", "transport"], ["hand-over", "training step"]
    assert stages == ["staging", "TensorFlow queue", *workers, *main]


def test_a_slow_make_is_the_source_and_not_the_step() -> None:
    def make() -> Any:
        time.sleep(0.005)
        return tf.zeros(4), tf.zeros(4)

    with TensorInput(make, length=6, signature=(tf.TensorSpec([4], tf.float32),) * 2) as batches:
        list(batches)

    assert UNKNOWN in str(batches.stats())


@pytest.mark.parametrize("name", ["queue", "staging-over-queue"])
def test_a_v1_graph_is_told_that_its_own_time_is_unknown(name: str) -> None:
    with tf.Graph().as_default(), WHOLE[name](lambda: slow_batches(100)) as batches:
        step = batches.dequeue()
        with tf.compat.v1.Session() as session:
            batches.start(session)
            for _ in range(12):
                session.run(step)
            stats = batches.stats()

    assert stats.verdict
    assert (stats.verdict.limit, stats.verdict.next_limit) == ("source", "")
    assert UNKNOWN in str(stats)


def test_nothing_is_said_before_the_second_batch() -> None:
    with QueueInput([np.zeros((2, 3), np.uint8)]) as batches:
        assert batches.stats().verdict is None
        list(batches)
        assert batches.stats().verdict is None
        assert "QueueInput" in str(batches.stats())


BATCHES = [
    {
        "image": np.full((rows, 4, 4), 10 * number, np.float32),
        "number": np.arange(rows) + 3 * number,
        "key": [b"k"] * rows,
    }
    for number, rows in enumerate([3, 3, 3, 3, 1])
]
SIGNATURE = {
    "image": tf.TensorSpec([None, 4, 4], tf.float32),
    "number": tf.TensorSpec([None], tf.int64),
    "key": tf.TensorSpec([None], tf.string),
}
NUMBERS = list(range(13))


@contextmanager
def sending(endpoint: str, batches: Any = BATCHES, *, epochs: int = 1) -> Iterator[Any]:
    """A future of the result of sending each epoch."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(lambda: [send_batches(batches, endpoint) for _ in range(epochs)])


@pytest.fixture
def source() -> Iterator[ZMQInput]:
    with ZMQInput(ANY_PORT, SIGNATURE) as source:
        yield source


def test_three_epochs_arrive_exactly_once(source: ZMQInput) -> None:
    with sending(source.endpoint, epochs=3) as sent:
        for _ in range(3):
            batches = list(source)
            assert [number for batch in batches for number in batch["number"].numpy().tolist()] == NUMBERS
            assert [set(b["image"].numpy().ravel().tolist()) for b in batches] == [
                {10.0 * n} for n in range(5)
            ]
            assert batches[-1]["key"].numpy().tolist() == [b"k"]
        assert sent.result(TIMEOUT_S) == [5, 5, 5]
    assert source.rejected == 0
    assert source.stats().epochs == 3


def failing() -> Iterator[Any]:
    yield BATCHES[0]
    raise OwnError("the disk is wet")


def test_a_sender_s_error_is_raised_through_tensorflow(source: ZMQInput) -> None:
    step = tf.function(lambda: source.dequeue()["number"])

    said = pytest.raises(SenderFailed, match="the disk is wet")
    with sending(source.endpoint, failing) as sent, said, original_errors():
        until_the_end(step)
    assert isinstance(sent.exception(), OwnError)


def test_a_capacity_in_bytes_counts_the_signature() -> None:
    fixed = (tf.TensorSpec([10, 10], tf.float32), tf.TensorSpec([10], tf.int64))

    with ZMQInput(ANY_PORT, fixed, capacity="2KB") as source:
        assert source.stats().capacity == 2000 // 480


@pytest.mark.parametrize(
    ("name", "value"),
    [("signature", None), ("signature", (np.zeros(3),)), ("capacity", "1MB"), ("capacity", 0)],
)
def test_invalid_options_are_refused_and_the_endpoint_is_free(name: str, value: Any) -> None:
    with FrameReceiver(ANY_PORT) as receiver:
        endpoint = receiver.endpoint

    with pytest.raises(UsageError):
        ZMQInput(**{"endpoint": endpoint, "signature": SIGNATURE, name: value})
    FrameReceiver(endpoint).close()
