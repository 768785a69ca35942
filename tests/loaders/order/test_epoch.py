"""The order of an epoch, the epochs of a plan, and the sources of its rank and world size."""

import json
import subprocess
import sys
from fractions import Fraction
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st

from shardprep.formats.errors import UsageError
from shardprep.loaders.order import parts as partition_module
from shardprep.loaders.order.epoch import Epoch, EpochPlan, GlobalShuffle, LocalShuffle, Shuffle, resume_epoch
from shardprep.loaders.order.parts import MAX_RECORDS, WeightedParts, apportion
from shardprep.loaders.order.ranks import rank_and_world_size, refuse_changed_rank
from support.sampling import torture_except
from support.whole_order import whole_order

SHARDS = (13, 5, 0, 20, 2)


def plan(**options: Any) -> EpochPlan:
    defaults = {
        "dataset": "sha256:abc",
        "shard_counts": SHARDS,
        "shuffle": LocalShuffle(9),
        "seed": 7,
        "batch_size": 4,
        "rank": 0,
        "world_size": 1,
        "drop_last": False,
    }
    return EpochPlan(**(defaults | options))


STATE = Epoch(plan(), 0).state()
FOREIGN = [
    ({"version": 3}, "version"),
    ({"dataset": "sha256:abd"}, "another dataset"),
    ({"seed": 8}, "another seed"),
    ({"shuffle": None}, "another shuffle"),
    ({"shuffle": {"kind": "local", "window": 10}}, "another shuffle"),
    ({"epoch": -1}, "-1 is not a number"),
    ({"epoch": 1}, "another epoch"),
    ({"epoch": 1 << 64}, "epoch"),
    ({"place": -1}, "-1 is not a number"),
    ({"place": sum(SHARDS) + 1}, "cannot continue"),
    ({"place": True}, "true is not a number"),
    ({"rank": None}, "null is not a number"),
    ({"world_size": "1"}, '"1" is not a number'),
    ({"receipt": None}, "receipt"),
    ({"receipt": STATE["receipt"] | {"version": 9}}, "receipt"),
    ({"receipt": STATE["receipt"] | {"dataset": "sha256:abd"}}, "another epoch or dataset"),
    ({"receipt": STATE["receipt"] | {"epoch": 4}}, "another epoch or dataset"),
    ({"receipt": STATE["receipt"] | {"delivered": {"count": -4, "digest": "0" * 32}}}, "receipt"),
]


@pytest.mark.parametrize(("change", "message"), FOREIGN)
def test_a_state_that_is_not_of_this_plan_is_an_error(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resume_epoch(plan(), STATE | change)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shuffle",
    torture_except(
        ["None", "LocalShuffle(50_000)", "LocalShuffle(1_000_000)", "GlobalShuffle()"], "LocalShuffle(50_000)"
    ),
)
def test_order_and_state_of_imagenet_take_less_than_50_mb_in_any_window(shuffle: str) -> None:
    script = f"""
import json
from pathlib import Path
from shardprep.loaders import GlobalShuffle, LocalShuffle
from shardprep.loaders.order.epoch import Epoch, EpochPlan, resume_epoch

def peak():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024

before = peak()
plan = EpochPlan("root", (2224,) * 576, {shuffle}, 0, 256, 0, 2, True)
epoch = Epoch(plan, 0)
for turn in range(4):
    for step, numbers in zip(range(100), epoch.batches()):
        epoch.record_delivery(numbers, [])
    del numbers
    epoch = resume_epoch(plan, json.loads(json.dumps(epoch.state())))
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert float(done.stdout) < 50


LIGHTNING = {"WORLD_SIZE": "4", "LOCAL_RANK": "1", "NODE_RANK": "0"}
MPI = ("MV2_COMM_WORLD", "HOROVOD", "PMI")
STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_NTASKS": "8"}
CLUSTER = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"], "evaluator": ["e:1"]}


def tf_config(kind, index, cluster=CLUSTER):
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"RANK": "3", "WORLD_SIZE": "4"}, (3, 4)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, (1, 2)),
        (STEP, (5, 8)),
        (STEP | {"SLURM_STEP_NUM_TASKS": "6"}, (5, 6)),
        (STEP | {"RANK": "0", "WORLD_SIZE": "2"}, (0, 2)),
        *((STEP | {f"{m}_RANK": "6", f"{m}_SIZE": "7"}, (6, 7)) for m in MPI),
        (LIGHTNING, (1, 4)),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "0"}, (0, 2)),
        (LIGHTNING | {"NODE_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, (3, 4)),
        (LIGHTNING | {"RANK": "2"}, (2, 4)),
        ({"LOCAL_RANK": "1"}, (0, 1)),
        (tf_config("chief", 0), (0, 3)),
        (tf_config("worker", 1), (2, 3)),
        (tf_config("worker", 1, {"worker": ["b:1", "c:1"]}), (1, 2)),
        (tf_config("evaluator", 0), (0, 1)),
        (tf_config("worker", 0, {}), (0, 1)),
        ({"TF_CONFIG": ""}, (0, 1)),
        ({"TF_CONFIG": "{}"}, (0, 1)),
    ],
)
def test_every_launcher_is_understood(environ, expected):
    assert rank_and_world_size(environ=environ) == expected


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "RANK is not"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK must be from 0 to 1"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE must be at least 1"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE must be a whole number, not 'two'"),
        (LIGHTNING | {"LOCAL_RANK": "4"}, "LOCAL_RANK must be from 0 to 3"),
        (LIGHTNING | {"NODE_RANK": "1"}, "NODE_RANK=1, LOCAL_RANK=1 and WORLD_SIZE=4 .* LOCAL_WORLD_SIZE"),
        (LIGHTNING | {"NODE_RANK": "9" * 5000, "LOCAL_WORLD_SIZE": "2"}, "NODE_RANK must be a whole number"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE is not"),
        ({"SLURM_STEP_ID": "1", "SLURM_PROCID": "0"}, "SLURM_NTASKS is not"),
        ({"TF_CONFIG": "{"}, "TF_CONFIG"),
        ({"TF_CONFIG": "[]"}, "TF_CONFIG"),
        ({"TF_CONFIG": '{"cluster": {"worker": 3}}'}, "TF_CONFIG"),
        (tf_config("worker", 2), "TF_CONFIG has the task worker 2 in a cluster of 2"),
        (tf_config("worker", "1"), "TF_CONFIG"),
        (tf_config("ps", 0), "TF_CONFIG has the task type 'ps'"),
    ],
)
def test_a_half_given_or_senseless_value_names_its_variable(environ, named):
    with pytest.raises(UsageError, match=named):
        rank_and_world_size(environ=environ)


@pytest.fixture
def initialised(monkeypatch):
    """Put initialised frameworks where the real ones are when they are imported."""

    def initialise(torch=None, jax=None):
        group = SimpleNamespace(
            is_available=lambda: True,
            is_initialized=lambda: torch is not None,
            get_rank=lambda: torch[0],
            get_world_size=lambda: torch[1],
        )
        monkeypatch.setitem(sys.modules, "torch.distributed", group)
        processes = SimpleNamespace(
            distributed=SimpleNamespace(is_initialized=lambda: jax is not None),
            process_index=lambda: jax[0],
            process_count=lambda: jax[1],
        )
        monkeypatch.setitem(sys.modules, "jax", processes)

    return initialise


@pytest.mark.parametrize("environ", [{"RANK": "1", "WORLD_SIZE": "2"}, STEP | {"SLURM_NTASKS": "2"}])
def test_a_launcher_that_starts_one_process_per_machine_does_not_contradict_its_ranks(initialised, environ):
    environ = environ | {"SLURM_PROCID": "1"}
    initialised(torch=(5, 8))

    assert rank_and_world_size(environ=environ) == (5, 8)


@pytest.mark.parametrize(
    ("others", "environ", "said"),
    [
        ({}, {"RANK": "2", "WORLD_SIZE": "4"}, "rank 2 of 4 according to RANK and WORLD_SIZE: give .* rank="),
        ({}, {"RANK": "3", "WORLD_SIZE": "8"}, "rank 3 of 8 according to RANK and WORLD_SIZE"),
        ({}, {"RANK": "2", "WORLD_SIZE": "3"}, "rank 2 of 3 according to RANK and WORLD_SIZE"),
        ({}, STEP, "rank 5 of 8 according to SLURM_PROCID and SLURM_NTASKS"),
        ({"jax": (1, 2)}, {}, r"rank 1 of 2 according to jax\.distributed"),
    ],
)
def test_sources_of_a_rank_that_contradict_each_other_are_an_error(initialised, others, environ, said):
    initialised(torch=(3, 4), **others)

    with pytest.raises(UsageError, match=rf"rank 3 of 4 according to torch\.distributed, but .*{said}"):
        rank_and_world_size(environ=environ)


def test_a_framework_that_is_initialised_later_is_an_error_where_its_rank_is_another(initialised):
    initialised(torch=(1, 2))

    refuse_changed_rank(1, 2)
    with pytest.raises(UsageError, match=r"rank 1 of 2 .* torch\.distributed, but rank 0 of 1 .* the Loader"):
        refuse_changed_rank(0, 1)


shuffles = (
    st.none() | st.just(GlobalShuffle()) | st.builds(LocalShuffle, st.integers(1, 500), st.integers(1, 6))
)
keys = st.integers(0, (1 << 64) - 1)
blocks = st.integers(1, 100)  # places in one, so that there are many


@given(
    counts=st.lists(st.integers(0, 60), max_size=8),
    shuffle=shuffles,
    seed=keys,
    epoch=keys,
    block=blocks,
    ends=st.lists(st.tuples(st.integers(0, 500), st.integers(0, 500)), max_size=12),
    data=st.data(),
)
def test_every_range_and_every_place_is_that_of_the_whole_order(
    counts: list[int],
    shuffle: Shuffle | None,
    seed: int,
    epoch: int,
    block: int,
    ends: list[tuple[int, int]],
    data: st.DataObject,
) -> None:
    assume(not 0 < sum(counts) < (shuffle.partitions if shuffle else 1))  # a plan refuses that
    expected = whole_order(counts, shuffle=shuffle, seed=seed, epoch=epoch)
    with patch.object(partition_module, "BLOCK", block):
        order = plan(shard_counts=tuple(counts), shuffle=shuffle, seed=seed, batch_size=60).order(epoch)
    places = data.draw(st.lists(st.integers(0, len(expected) - 1), max_size=30)) if len(expected) else []

    assert len(order) == len(expected)
    for start, stop in ends:  # of one order, whose blocks come and go
        np.testing.assert_array_equal(order[start:stop], expected[start:stop], strict=True)
    assert list(order.numbers_at(places)) == expected[places].tolist()


def test_too_many_records_are_refused() -> None:
    with pytest.raises(UsageError, match="more than"):
        plan(shard_counts=(MAX_RECORDS, 1))


@st.composite
def weighted(draw: st.DrawFn) -> WeightedParts:
    records = draw(st.lists(st.integers(1, 60), min_size=1, max_size=5))
    names = [f"part-{number}" for number in range(len(records))]
    weights = {name: draw(st.one_of(st.integers(1, 1000), st.floats(1e-3, 1e3))) for name in names}
    assume(all(apportion(sum(records), [Fraction(weight) for weight in weights.values()])))
    return WeightedParts.of(weights, names, records)


@given(weighted(), st.integers(0, 1 << 63))
def test_each_part_has_its_places_of_an_epoch_and_no_record_comes_twice_as_often(
    parts: WeightedParts, epoch: int
) -> None:
    counts = np.bincount(parts.positions(np.arange(sum(parts.places)), epoch), minlength=sum(parts.records))
    for own, places in zip(np.split(counts, np.cumsum(parts.records)[:-1]), parts.places, strict=True):
        assert own.sum() == places
        assert own.max() - own.min() <= 1
