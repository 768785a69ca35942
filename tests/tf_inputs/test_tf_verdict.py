"""The verdict of an input on what limits a TensorFlow step."""

import json
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tf_devices import tf
from verdict_workers import Nothing, Sleeping

from shardprep.loaders import Loader
from shardprep.loaders.tf_inputs import FeedInput, Input, InputStats, QueueInput, StagingInput

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


@often
@pytest.mark.parametrize("name", ["queue", "staged queue"])
def test_a_slow_step_is_named_in_every_run(name: str, runs: int, lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards, Nothing()) as loader:
        stats = list(runs_of(INPUTS[name], loader, slow_step, runs))

    assert [s.verdict.limit for s in stats if s.verdict] == ["training step"] * runs
    assert "nothing to gain" in str(stats[-1])


@often
@pytest.mark.parametrize("name", INPUTS)
def test_slow_workers_are_named_through_every_input(name: str, runs: int, lmdb_shards: Path) -> None:
    with loader_on(lmdb_shards, Sleeping(0.004)) as loader:
        stats = list(runs_of(INPUTS[name], loader, fast_step, runs))

    assert [s.verdict.limit for s in stats if s.verdict] == ["augment"] * runs
    assert "more workers help" in str(stats[-1])


@pytest.mark.parametrize("name", INPUTS)
def test_a_slow_source_that_is_no_loader_is_named(name: str) -> None:
    def slow() -> Iterator[Any]:
        for number in range(12):
            time.sleep(0.005)
            yield np.zeros((4, 8), np.uint8), np.full(4, number)

    stats = next(runs_of(INPUTS[name], slow, fast_step))

    assert stats.verdict
    assert (stats.verdict.limit, stats.verdict.unit) == ("source", "batches")


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
