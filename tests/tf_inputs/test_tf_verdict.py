"""The verdict of an input on what limits a TensorFlow step."""

import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.loaders import Flow, Loader
from shardprep.loaders.loader.stats import Verdict
from shardprep.loaders.tf_inputs import FeedInput, Input, InputStats, QueueInput, StagingInput, TensorInput
from support.flow_functions import slow_item
from support.sampling import torture_except
from support.tf_devices import tf
from support.verdict_workers import Nothing, Sleeping

INPUTS: dict[str, Callable[[Any], Input]] = {
    "feed": FeedInput,
    "queue": QueueInput,
    "staged queue": lambda source: StagingInput(QueueInput(source)),
}


often = pytest.mark.parametrize("runs", [4, pytest.param(20, marks=pytest.mark.torture)])


def loader_on(path: Path, transform: Nothing) -> Loader:
    return Loader(path, batch_size=4, transform=transform, workers=2, rank=0, world_size=1)


@tf.function
def slow_step(images: Any, labels: Any) -> Any:
    """A step that takes at least 20 ms within TensorFlow."""
    waited = tf.py_function(lambda: time.sleep(0.02), [], [])
    with tf.control_dependencies([waited]):
        return tf.reduce_sum(labels)


def fast_step(images: Any, labels: Any) -> Any:
    return labels


def runs_of(
    make: Callable[[Any], Input], source: Any, step: Callable[..., Any], runs: int = 1
) -> Iterator[InputStats]:
    for _ in range(runs):
        with make(source) as batches:
            for images, labels in islice(batches, 12):
                step(images, labels)
            yield batches.stats()


@pytest.mark.torture
@often
@pytest.mark.parametrize("name", torture_except(["queue", "staged queue"], "queue"))
def test_a_slow_step_is_named_in_every_run(name: str, runs: int, lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards, Nothing()) as loader:
        stats = list(runs_of(INPUTS[name], loader, slow_step, runs))

    assert [s.verdict.limit for s in stats if s.verdict] == ["training step"] * runs
    assert "would gain nothing" in str(stats[-1])


@pytest.mark.torture
@often
@pytest.mark.parametrize("name", INPUTS)
def test_slow_workers_are_named_through_every_input(name: str, runs: int, lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards, Sleeping(0.004)) as loader:
        stats = list(runs_of(INPUTS[name], loader, fast_step, runs))

    assert [s.verdict.limit for s in stats if s.verdict] == ["augment"] * runs
    assert "more workers help" in str(stats[-1])


def slow_batches(batches: int = 12) -> Iterator[Any]:
    for number in range(batches):
        time.sleep(0.005)
        yield np.zeros((4, 8), np.uint8), np.full(4, number)


UNKNOWN = "the source is slow; where it spends its time is unknown here"


@pytest.mark.parametrize("name", INPUTS)
def test_a_slow_source_that_is_no_loader_is_named(name: str) -> None:
    stats = next(runs_of(INPUTS[name], slow_batches, fast_step))

    assert stats.verdict
    assert (stats.verdict.limit, stats.verdict.unit) == ("source", "batches")
    assert UNKNOWN in str(stats)


@pytest.mark.torture
def test_a_flow_with_processes_is_not_told_to_work_in_processes() -> None:
    with Flow.from_iterable(range(48)).map(slow_item, processes=2).batch(4) as flow:
        stats = next(runs_of(QueueInput, flow, fast_step))

    assert stats.verdict
    assert stats.verdict.limit not in ("training step", "TensorFlow queue")
    assert "a Loader works" not in str(stats)


class Timed:
    """A slow source that has stats with a verdict."""

    verdict = Verdict("map(crop)", 200.0, "", float("inf"), "more processes help", "items")

    def __iter__(self) -> Iterator[Any]:
        return slow_batches()

    def stats(self) -> "Timed":
        return self


@pytest.mark.parametrize("name", INPUTS)
def test_what_a_source_knows_of_its_limit_is_told(name: str) -> None:
    stats = next(runs_of(INPUTS[name], Timed(), fast_step))

    assert stats.verdict
    assert (stats.verdict.limit, stats.verdict.unit) == ("map(crop)", "batches")
    assert "more processes help" in str(stats)
    json.dumps(stats.to_dict())


@pytest.mark.parametrize("name", INPUTS)
def test_prefetch_is_advised_only_where_the_step_waits_for_a_generator(name: str) -> None:
    stats = next(runs_of(INPUTS[name], Flow.from_callable(slow_batches), fast_step))

    assert stats.verdict
    assert stats.verdict.limit == "from_callable(slow_batches)"
    assert "give map() threads= or processes=" in stats.verdict.advice
    assert ("prefetch()" in stats.verdict.advice) == (name == "feed")


def test_a_source_that_waits_for_its_consumer_is_not_the_limit_of_itself() -> None:
    source = Timed()
    source.verdict = Verdict("training step", 200.0, "", float("inf"), "slow step", "items")

    assert UNKNOWN in str(next(runs_of(QueueInput, source, fast_step)))


def test_a_slow_make_is_the_source_and_not_the_step() -> None:
    def make() -> Any:
        time.sleep(0.005)
        return tf.zeros(4), tf.zeros(4)

    signature = (tf.TensorSpec([4], tf.float32),) * 2
    with TensorInput(make, length=6, signature=signature) as batches:
        list(batches)

    assert UNKNOWN in str(batches.stats())


def test_what_a_slow_step_hides_is_told_at_its_own_rate() -> None:
    source = [(np.zeros((4, 8), np.uint8), np.full(4, number)) for number in range(12)]

    verdict = next(runs_of(FeedInput, source, slow_step)).verdict

    assert verdict
    assert (verdict.limit, verdict.next_limit) == ("training step", "source")
    assert verdict.next_rate > 2 * verdict.rate


def test_passes_of_few_batches_have_the_rate_of_all_batches() -> None:
    with FeedInput(lambda: slow_batches(2)) as batches:
        began = time.perf_counter()
        for _ in range(6):
            list(batches)
        seconds = time.perf_counter() - began
        stats = batches.stats()

    assert (stats.batches, stats.timed) == (12, 11)
    assert stats.verdict
    assert stats.verdict.rate < 12 / (seconds - 0.005) * 1.2


def test_an_epochs_stats_are_those_since_the_one_before() -> None:
    with QueueInput(lambda: slow_batches(3)) as batches, StagingInput(batches) as staged:
        list(staged)
        before = staged.stats()
        list(staged)
        after = staged.stats()
    epoch = after.since(before)

    assert (epoch.batches, epoch.timed, epoch.fed, epoch.epochs) == (3, 3, 3, 1)
    assert epoch.elapsed == after.elapsed - before.elapsed > 0
    for name, count in (("mean_level", "fed"), ("blocked", "fed"), ("starved", "batches")):
        both = [getattr(each, name) * getattr(each, count) for each in (before, epoch)]
        assert sum(both) == pytest.approx(getattr(after, name) * getattr(after, count))
    assert epoch.source
    assert epoch.source.batches == 3
    assert epoch.verdict
    assert "source limits" in str(epoch)
    assert after.since(after).verdict is None


@pytest.mark.torture
def test_the_loaders_part_of_an_epoch_is_its_own(lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards, Nothing()) as loader, QueueInput(loader) as batches:
        deque(batches, maxlen=0)
        before = batches.stats()
        deque(batches, maxlen=0)
        epoch = batches.stats().since(before)

    assert epoch.loader
    assert epoch.loader.batches == epoch.batches == before.batches


@pytest.mark.torture
def test_a_graph_that_dequeues_is_told_the_same(lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards, Nothing()) as loader, QueueInput(loader) as batches:

        @tf.function
        def step() -> Any:
            return slow_step(*batches.dequeue())

        for _ in range(12):
            step()
        verdict = batches.stats().verdict

    assert verdict
    assert verdict.limit == "training step"


def test_a_graph_that_waits_is_told_that_its_own_time_is_unknown() -> None:
    with QueueInput(slow_batches) as batches:

        @tf.function
        def step() -> Any:
            return batches.dequeue()

        for _ in range(10):
            step()
        verdict = batches.stats().verdict

    assert verdict
    assert (verdict.limit, verdict.next_limit) == ("source", "")
    assert str(verdict).endswith("; what would limit next is unknown.")
    assert verdict.to_dict()["next_rate"] is None


@pytest.mark.parametrize("name", ["queue", "staged queue"])
def test_a_v1_graph_is_told_that_its_own_time_is_unknown(name: str) -> None:
    with tf.Graph().as_default(), INPUTS[name](lambda: slow_batches(100)) as batches:
        step = batches.dequeue()
        with tf.compat.v1.Session() as session:
            batches.start(session)
            for _ in range(12):
                session.run(step)
            stats = batches.stats()

    assert stats.verdict
    assert (stats.verdict.limit, stats.verdict.next_limit) == ("source", "")
    assert UNKNOWN in str(stats)


@pytest.mark.torture
def test_stats_are_plain_json_with_every_stage(lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards, Nothing()) as loader:
        found = next(runs_of(INPUTS["staged queue"], loader, fast_step)).to_dict()

    assert json.loads(json.dumps(found))["verdict"] == found["verdict"]
    stages = [found["load"]["name"], found["source"]["load"]["name"]]
    stages += [load["name"] for load in found["source"]["loader"]["loads"]]
    assert stages == [
        *(
            "staging",
            "TensorFlow queue",
            "read",
            "decode",
            "augment",
            "transport",
            "hand-over",
            "training step",
        )
    ]


def test_nothing_is_said_before_the_second_batch() -> None:
    with QueueInput([np.zeros((2, 3), np.uint8)]) as batches:
        assert batches.stats().verdict is None
        list(batches)
        assert batches.stats().verdict is None
        assert "QueueInput" in str(batches.stats())
