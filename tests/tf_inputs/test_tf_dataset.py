"""Conversion to and from tf.data: cardinality, distribution, kept batches, and lifetimes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from socket import socket
from typing import Any

import numpy as np
import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders.tf_inputs import (
    DatasetInput,
    TensorInput,
    original_errors,
    to_dataset,
)
from support.loaded import loader_on
from support.repository import SUPPORT
from support.sampling import torture_except
from support.tf_devices import tf
from support.tf_members import first


@pytest.mark.torture
@pytest.mark.parametrize("replicas", torture_except([2, 3], 3))
def test_a_strategy_distributes_it_exactly(replicas: int, lmdb_shards: Path) -> None:
    strategy = tf.distribute.MirroredStrategy([f"CPU:{n}" for n in range(replicas)])
    with loader_on(lmdb_shards, batch_size=20, workers=1) as loader:
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


def test_an_infinite_dataset_has_no_end_of_epoch() -> None:
    with DatasetInput(tf.data.Dataset.range(3).repeat()) as each:
        assert each.batches_per_epoch is None
        assert [int(np.array(n)) for n in first(each, 7)] == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("wrong", [[1, 2], None, tf.data.Dataset])
def test_what_is_no_dataset_is_an_error_at_once(wrong: Any) -> None:
    with pytest.raises(UsageError, match=r"tf\.data\.Dataset"):
        DatasetInput(wrong)


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


def test_a_maker_that_stops_is_an_error_and_no_short_epoch() -> None:
    values = iter([tf.zeros([2])] * 4)
    with TensorInput(lambda: next(values), length=10) as made, pytest.raises(RuntimeError):
        list(made)
