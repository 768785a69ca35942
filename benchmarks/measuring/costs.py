"""The cost of the order and the state of 1.28 million records, for several windows."""

from __future__ import annotations

import json
import statistics
import time
import tracemalloc
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice

from shardprep.loaders import GlobalShuffle, LocalShuffle
from shardprep.loaders.order.epoch import Epoch, EpochPlan

RECORDS, SHARD_RECORDS = 1_281_167, 2_300  # the training split in shards of 256 MiB

PLAN = EpochPlan(
    dataset="sha256:" + "0" * 64,
    shard_counts=(*[SHARD_RECORDS] * (RECORDS // SHARD_RECORDS), RECORDS % SHARD_RECORDS),
    shuffle=None,
    seed=0,
    batch_size=256,
    rank=0,
    world_size=1,
    drop_last=True,
)


def report() -> None:
    print(f"\nThe order of {RECORDS:,} records: first batch, all batches of an epoch, MB at the peak")
    for shuffle in (
        None,
        LocalShuffle(1_000),
        LocalShuffle(100_000),
        LocalShuffle(1_000_000),
        GlobalShuffle(),
    ):
        plan = replace(PLAN, shuffle=shuffle)
        first, whole = partial(_batches, plan, 1), partial(_batches, plan, len(plan.split(0)))
        print(
            f"  {shuffle!s:30} {_milliseconds(first):6.1f} ms {_milliseconds(whole):6.1f} ms {_peak(whole):6.1f} MB"
        )
    epoch = Epoch(PLAN, 3)
    state = len(json.dumps(epoch.state()))
    print(f"  a state: {_milliseconds(epoch.state):.2f} ms, {state} bytes of JSON")


def _batches(plan: EpochPlan, count: int) -> None:
    deque(islice(Epoch(plan, 3).batches(), count), maxlen=0)


def _milliseconds(call: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        began = time.perf_counter()
        call()
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


def _peak(call: Callable[[], object]) -> float:
    tracemalloc.start()
    call()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak / 1e6
