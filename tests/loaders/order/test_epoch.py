"""One epoch: plans without a batch, and states that are of no epoch of a plan."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given, strategies as st

from shardprep.formats.errors import UsageError
from shardprep.loaders import LocalShuffle
from shardprep.loaders.order.epoch import Epoch, EpochPlan, resumed
from shardprep.loaders.order.epoch_order import RankSplit
from support.sampling import torture_except

SHARDS = (13, 5, 0, 20, 2)
RECORDS = sum(SHARDS)


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


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (
            {"batch_size": 41, "drop_last": True},
            "40 records has no batch with batch_size=41 and drop_last=True; "
            "use a batch_size of at most 40 or drop_last=False",
        ),
        (
            {"batch_size": 21, "drop_last": True, "world_size": 2},
            "40 records has no batch with batch_size=21 for each of 2 ranks and drop_last=True; "
            "use a batch_size of at most 20 or drop_last=False",
        ),
        (
            {"batch_size": 1, "drop_last": True, "world_size": 41},
            "batch_size=1 for each of 41 ranks and drop_last=True; use at most 40 ranks",
        ),
        (
            {"batch_size": 8, "world_size": 41},
            "batch_size=8 for each of 41 ranks and drop_last=False; use at most 40 ranks",
        ),
    ],
)
def test_an_epoch_without_a_batch_is_an_error_for_every_rank(options: dict[str, Any], named: str) -> None:
    for rank in range(options.get("world_size", 1)):
        with pytest.raises(UsageError, match=named):
            plan(**options, rank=rank)


@given(batch=st.integers(1, 50), world=st.integers(1, 50), drop_last=st.booleans())
def test_a_plan_is_refused_exactly_where_a_rank_would_have_no_batch(
    batch: int, world: int, drop_last: bool
) -> None:
    fewest = min(len(RankSplit(RECORDS, batch, rank, world, drop_last)) for rank in range(world))

    with nullcontext() if fewest else pytest.raises(UsageError, match="no batch"):
        plan(batch_size=batch, world_size=world, drop_last=drop_last)


STATE = Epoch(plan(), 0).state()
FOREIGN = [
    ({"version": 2}, "version"),
    ({"version": None}, "version"),
    ({"dataset": "sha256:abd"}, "another dataset"),
    ({"seed": 8}, "another seed"),
    ({"shuffle": None}, "another shuffle"),
    ({"shuffle": {"kind": "local", "window": 10}}, "another shuffle"),
    ({"shuffle": "no"}, "another shuffle"),
    ({"epoch": -1}, "epoch"),
    ({"epoch": 1}, "another epoch"),
    ({"epoch": "0"}, "epoch"),
    ({"epoch": 1 << 64}, "epoch"),
    ({"place": -1}, "place"),
    ({"place": RECORDS + 1}, "cannot continue"),
    ({"place": 1.0}, "place"),
    ({"place": True}, "place"),
    ({"place": [4]}, "place"),
    ({"rank": None}, "rank"),
    ({"world_size": "1"}, "world_size"),
    ({"receipt": None}, "receipt"),
    ({"receipt": []}, "receipt"),
    ({"receipt": {}}, "receipt"),
    ({"receipt": STATE["receipt"] | {"version": 9}}, "receipt"),
    ({"receipt": STATE["receipt"] | {"dataset": "sha256:abd"}}, "another epoch or dataset"),
    ({"receipt": STATE["receipt"] | {"epoch": 4}}, "another epoch or dataset"),
    ({"receipt": STATE["receipt"] | {"delivered": {"count": -4, "digest": "0" * 32}}}, "receipt"),
    ({"receipt": STATE["receipt"] | {"delivered": {"count": 4, "digest": "x" * 32}}}, "receipt"),
]


@pytest.mark.parametrize(("change", "message"), FOREIGN)
def test_a_state_that_is_not_of_this_plan_is_an_error(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resumed(plan(), STATE | change)


@pytest.mark.parametrize("state", [None, {}, [], "state", 3, {"version": 1}])
def test_what_is_no_state_is_an_error(state: object) -> None:
    with pytest.raises(UsageError):
        resumed(plan(), state)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(name=st.sampled_from(sorted(STATE)), value=json_values)
def test_no_state_whatever_raises_anything_but_a_usage_error(name: str, value: object) -> None:
    try:
        epoch = resumed(plan(), STATE | {name: value})
    except UsageError:
        return
    for numbers in epoch.batches():
        epoch.delivered(numbers, [])


def test_all_differences_are_named_at_once() -> None:
    with pytest.raises(UsageError, match="another dataset and shuffle and seed"):
        resumed(plan(), STATE | {"dataset": "", "shuffle": None, "seed": 0})


@pytest.mark.parametrize("number", [-1, 1 << 64])
def test_an_epoch_that_has_no_random_numbers_is_an_error(number: int) -> None:
    with pytest.raises(UsageError, match="epoch must be"):
        Epoch(plan(), number)


def test_a_state_is_small_and_of_one_size_for_any_dataset() -> None:
    small = json.dumps(Epoch(plan(), 0).state())
    big = Epoch(plan(shard_counts=(1 << 20,) * 100), 0, start=50 << 20)

    assert len(json.dumps(big.state())) < len(small) + 20 < 1000


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")
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
from shardprep.loaders.order.epoch import Epoch, EpochPlan, resumed

def peak():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024

before = peak()
plan = EpochPlan("root", (2224,) * 576, {shuffle}, 0, 256, 0, 2, True)
epoch = Epoch(plan, 0)
for turn in range(4):
    for step, numbers in zip(range(100), epoch.batches()):
        epoch.delivered(numbers, [])
    del numbers
    epoch = resumed(plan, json.loads(json.dumps(epoch.state())))
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert float(done.stdout) < 50
