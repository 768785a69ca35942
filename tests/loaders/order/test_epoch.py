"""One epoch: plans without a batch, and states that are of no epoch of a plan."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders import LocalShuffle
from shardprep.loaders.order.epoch import Epoch, EpochPlan, resumed
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
