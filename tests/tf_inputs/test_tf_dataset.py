"""Conversion to and from tf.data: cardinality, distribution, kept batches, and lifetimes."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from socket import socket
from typing import Any

import numpy as np
import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders import Loader, LocalShuffle, SlotsHeld, TrainTransform
from shardprep.loaders.tf_inputs import (
    DatasetInput,
    QueueInput,
    StagingInput,
    original_errors,
    to_dataset,
)
from support.loader_workers import OwnError, Tagging
from support.repository import SUPPORT
from support.sampling import torture_except
from support.tf_devices import tf
from support.tf_members import Numbered, arrays, assert_whole, by_function, first, gather, numbers_of


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_no_more_is_drawn_ahead_than_asked_for(prefetch: int) -> None:
    drawn: list[int] = []
    batches = iter(to_dataset(Numbered(batches=50, last=3, before=drawn.append), prefetch=prefetch))
    for _ in range(5):
        next(batches)

    assert 5 <= len(drawn) <= 1 + 5 + prefetch  # one for the signature


@pytest.mark.parametrize(
    ("source", "cardinality"),
    [([np.zeros(3)] * 5, 5), (Numbered(), tf.data.UNKNOWN_CARDINALITY), (iter([np.zeros(2)]), -2)],
    ids=["list", "function", "iterator"],
)
def test_the_cardinality_is_the_sources(source: Any, cardinality: int) -> None:
    assert int(to_dataset(source).cardinality()) == cardinality


def test_tf_datas_own_steps_apply() -> None:
    source = Numbered()
    dataset = to_dataset(source)

    assert numbers_of([arrays(b) for b in dataset.unbatch().batch(5)]) == source.numbers()
    assert sorted(numbers_of([arrays(b) for b in dataset.shuffle(4)])) == source.numbers()
    assert numbers_of([arrays(b) for b in dataset.repeat(3)]) == source.numbers() * 3
    assert numbers_of([arrays(b) for b in dataset.take(2)]) == source.numbers()[:6]
    cached = dataset.cache()
    passes = [numbers_of([arrays(b) for b in cached]) for _ in range(2)]
    assert passes == [source.numbers()] * 2
    zipped = tf.data.Dataset.zip((dataset, tf.data.Dataset.range(10)))
    assert [int(n) for _, n in zipped] == list(range(6))


def test_a_new_iterator_ends_the_one_before() -> None:
    source = Numbered()
    dataset = to_dataset(source, prefetch=0)
    old = iter(dataset)
    next(old)
    assert_whole(source, [arrays(batch) for batch in dataset])

    with pytest.raises(UsageError, match="another iteration"), original_errors():
        next(old)


@pytest.mark.torture
def test_what_a_dataset_keeps_never_changes(lmdb_shards: Path) -> None:
    with Loader(
        lmdb_shards, batch_size=10, transform=TrainTransform(16), workers=1, slots=3, with_numbers=True
    ) as loader:
        dataset = to_dataset(loader)
        with pytest.warns(SlotsHeld):
            held = list(dataset)
        expected = [arrays(batch) for batch in held]
        loader.set_epoch(0)
        again = [arrays(batch) for batch in dataset]
        for one, other, now in zip(expected, again, held, strict=True):
            for x, y, z in zip(one, other, now, strict=True):
                np.testing.assert_array_equal(x, y)
                np.testing.assert_array_equal(x, np.array(z))


KEEPERS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda dataset: dataset,
    "an iterator": iter,
    "what it became": lambda dataset: dataset.map(lambda *parts: parts).unbatch().batch(4),
    "another's part": lambda dataset: tf.data.Dataset.zip((dataset, tf.data.Dataset.range(100))),
    "a distributed dataset": lambda dataset: tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"]
    ).experimental_distribute_dataset(dataset),
    "an input": DatasetInput,
}


@pytest.mark.parametrize("keeper", torture_except(KEEPERS, "an input"))
def test_a_dataset_lives_as_long_as_what_was_made_of_it_and_no_longer(keeper: str) -> None:
    ended: list[bool] = []

    def source() -> Iterator[Any]:
        try:
            yield from Numbered(batches=300, last=3)()
        finally:
            ended.append(True)

    kept = KEEPERS[keeper](to_dataset(source))
    ended.clear()
    gc.collect()
    batches = iter(kept)
    for _ in range(3):
        next(batches)
    gc.collect()
    assert not ended
    next(batches)

    del kept, batches
    gc.collect()

    assert ended == [True]


def test_the_plain_variant_of_a_dataset_that_is_gone_says_so() -> None:
    dataset = to_dataset(Numbered())
    variant, spec = tf.data.experimental.to_variant(dataset), dataset.element_spec
    del dataset
    gc.collect()
    with pytest.raises(tf.errors.OpError, match="is gone"):
        next(iter(tf.data.experimental.from_variant(variant, spec)))


@pytest.mark.torture
@pytest.mark.parametrize("replicas", torture_except([2, 3], 3))
def test_a_strategy_distributes_it_exactly(replicas: int, lmdb_shards: Path) -> None:
    strategy = tf.distribute.MirroredStrategy([f"CPU:{n}" for n in range(replicas)])
    with Loader(
        lmdb_shards,
        batch_size=20,
        transform=Tagging(),
        shuffle=LocalShuffle(60),
        workers=1,
        with_numbers=True,
        drop_last=False,
    ) as loader:
        distributed = strategy.experimental_distribute_dataset(to_dataset(loader))

        @tf.function(reduce_retracing=True)
        def step(batch: Any) -> Any:
            return strategy.run(lambda *parts: parts[-1] + 0, args=batch)

        for _ in range(2):
            got = [
                int(number)
                for batch in distributed
                for part in strategy.experimental_local_results(step(batch))
                for number in part
            ]
            assert sorted(got) == list(range(204))
            loader.receipt().check(204)


def test_a_dataset_of_tensorflows_is_an_input() -> None:
    dataset = tf.data.Dataset.range(10).batch(4).map(lambda n: {"n": n})
    with DatasetInput(dataset) as each:
        assert (len(each), each.batches_per_epoch, each.element_spec) == (3, 3, dataset.element_spec)
        for way in (lambda: [arrays(b) for b in each], by_function(each)):
            for _ in range(2):
                assert [n for batch in way() for n in batch["n"]] == list(range(10))
        assert each.to_dataset(prefetch=0) is dataset
    with QueueInput(dataset) as each:
        assert [n for batch in each for n in batch["n"].numpy()] == list(range(10))
        assert len(each) == 3


def test_an_infinite_dataset_has_no_end_of_epoch() -> None:
    with DatasetInput(tf.data.Dataset.range(3).repeat()) as each:
        assert each.batches_per_epoch is None
        assert [int(np.array(n)) for n in first(each, 7)] == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("wrong", [[1, 2], None, tf.data.Dataset])
def test_what_is_no_dataset_is_an_error_at_once(wrong: Any) -> None:
    with pytest.raises(UsageError, match=r"tf\.data\.Dataset"):
        DatasetInput(wrong)


def test_an_error_passes_through_many_hands_as_itself() -> None:
    def fail(step: int) -> None:
        if step == 2:
            raise OwnError("at 2")

    source = Numbered(before=fail)
    with StagingInput(QueueInput(to_dataset(QueueInput(source).to_dataset())), depth=2) as each:
        got: list[Any] = []
        with pytest.raises(OwnError, match="at 2"), original_errors():
            gather(each.to_dataset().map(lambda *parts: parts), got)
    assert numbers_of(got) == source.numbers()[:6]


def test_tensorflows_own_errors_stay_what_they_are() -> None:
    with pytest.raises(tf.errors.InvalidArgumentError), original_errors():
        tf.reshape(tf.range(5), [2, 2])
    with pytest.raises(ZeroDivisionError), original_errors():
        raise ZeroDivisionError


WORKER = """
import json, sys
from support.tf_devices import tf
from support.loader_workers import Tagging
from shardprep.loaders import Loader, LocalShuffle
from shardprep.loaders.tf_inputs import to_dataset

strategy = tf.distribute.MultiWorkerMirroredStrategy()
with Loader(sys.argv[1], batch_size=10, transform=Tagging(), shuffle=LocalShuffle(60), workers=1, with_numbers=True) as loader:
    distributed = strategy.distribute_datasets_from_function(lambda context: to_dataset(loader))

    @tf.function
    def step(batch):
        def replica(*parts):
            context = tf.distribute.get_replica_context()
            return parts[-1], context.all_reduce("sum", tf.reduce_sum(parts[-1]))
        return strategy.run(replica, args=batch)

    numbers, totals = [], []
    for batch in distributed:
        mine, total = step(batch)
        numbers += mine.numpy().tolist()
        totals.append(int(total))
    print(json.dumps({"numbers": numbers, "totals": totals, "left": loader.receipt().left_out.count}))
"""


@pytest.mark.torture
def test_two_machines_train_on_their_own_ranks(lmdb_shards: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WORKER)
    with socket() as one, socket() as other:
        for each in (one, other):
            each.bind(("127.0.0.1", 0))
        addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in (one, other)]
    started = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "train.py"), str(lmdb_shards)],
            env=os.environ
            | {
                "PYTHONPATH": SUPPORT,
                "TF_CONFIG": json.dumps(
                    {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
                ),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=120) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [process.returncode for process in started] == [0, 0], said

    one_said, other_said = (json.loads(out) for out, _ in said)
    numbers = one_said["numbers"] + other_said["numbers"]
    assert len(numbers) == len(set(numbers)) == 200
    assert one_said["totals"] == other_said["totals"]
    assert sum(one_said["totals"]) == sum(numbers)
