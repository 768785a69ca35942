"""The verdict of an input on what limits a TensorFlow step."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.loaders import Loader
from shardprep.loaders.loader.stats import Verdict
from shardprep.loaders.tf_inputs import FeedInput, Input, QueueInput, StagingInput, TensorInput
from support.tf_devices import tf
from support.verdict_workers import Nothing

INPUTS: dict[str, Callable[[Any], Input]] = {
    "feed": FeedInput,
    "queue": QueueInput,
    "staged queue": lambda source: StagingInput(QueueInput(source)),
}


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

    def stats(self) -> "Timed":
        return self


@pytest.mark.parametrize("name", INPUTS)
def test_what_a_source_knows_of_its_limit_is_told(name: str) -> None:
    with INPUTS[name](Timed()) as batches:
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
        INPUTS["staged queue"](loader) as batches,
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

    signature = (tf.TensorSpec([4], tf.float32),) * 2
    with TensorInput(make, length=6, signature=signature) as batches:
        list(batches)

    assert UNKNOWN in str(batches.stats())


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


def test_nothing_is_said_before_the_second_batch() -> None:
    with QueueInput([np.zeros((2, 3), np.uint8)]) as batches:
        assert batches.stats().verdict is None
        list(batches)
        assert batches.stats().verdict is None
        assert "QueueInput" in str(batches.stats())
