"""When an epoch uses shards, and how well it mixes them: against brute force."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from shardprep import GlobalShuffle, Loader, LocalShuffle
from shardprep.formats.errors import UsageError
from shardprep.loaders.order import shard_uses as module
from shardprep.loaders.order.epoch import EpochPlan
from shardprep.loaders.order.epoch_order import Shuffle
from shardprep.loaders.order.quality import ShuffleQuality, expected_classes, shuffle_quality
from shardprep.loaders.order.shard_uses import ShardUses, shard_uses


@st.composite
def plans(draw: st.DrawFn) -> EpochPlan:
    counts = tuple(draw(st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(any)))
    partitions = draw(st.sampled_from([1, 1, 2, 4]))
    window = draw(st.integers(1, 150))
    shuffle = draw(st.sampled_from([None, GlobalShuffle(), LocalShuffle(window, partitions=partitions)]))
    world_size = draw(st.sampled_from([1, 2, 4]))
    return plan(
        counts,
        shuffle,
        batch_size=draw(st.integers(1, 6)) * partitions,
        rank=draw(st.integers(0, world_size - 1)),
        world_size=world_size,
        drop_last=draw(st.booleans()),
    )


def plan(
    counts: tuple[int, ...],
    shuffle: Shuffle | None,
    batch_size: int = 8,
    rank: int = 0,
    world_size: int = 1,
    drop_last: bool = True,
) -> EpochPlan:
    with suppress(UsageError):
        return EpochPlan("", counts, shuffle, 3, batch_size, rank, world_size, drop_last)
    return EpochPlan("", (64,) * 8, None, 3, batch_size, rank, world_size, drop_last)


@given(plans(), st.data())
def test_the_peak_is_the_largest_sum_of_sizes_at_one_step(plan: EpochPlan, data: st.DataObject) -> None:
    shards = len(plan.shard_counts)
    sizes = np.array(data.draw(st.lists(st.integers(0, 99), min_size=shards, max_size=shards)), np.int64)
    uses = shard_uses(plan, 0)
    assert uses.peak(sizes) == max(int(sizes[uses.at(step)].sum()) for step in range(len(plan.split(0))))


@pytest.mark.parametrize("partitions", [1, 4])
def test_bounds_hold_all_uses_and_are_near_them(partitions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    big = plan((500,) * 400, LocalShuffle(20_000, partitions=partitions), 256, rank=1, world_size=2)
    exact = shard_uses(big, 1)
    monkeypatch.setattr(module, "EXACT_RECORDS", 0)
    bounds = shard_uses(big, 1)
    first, last = by_shard(exact), by_shard(bounds)
    assert set(first) <= set(last)
    steps = len(big.split(0))
    for shard, (begin, end) in first.items():
        assert 0 <= begin - last[shard][0] < 0.05 * steps
        assert 0 <= last[shard][1] - end < 0.05 * steps


def by_shard(uses: ShardUses) -> dict[int, tuple[int, int]]:
    rows = zip(uses.shards.tolist(), uses.firsts.tolist(), uses.lasts.tolist(), strict=True)
    return {shard: (first, last) for shard, first, last in rows}


RECORDS, CLASSES = 60_000, 100
SHARDS = (500,) * (RECORDS // 500)
SORTED = np.arange(RECORDS) * CLASSES // RECORDS
MIXED = np.random.default_rng(1).permutation(SORTED)


def plan_of(shuffle: Any, *, shards: Sequence[int] = SHARDS, batch: int = 64, **options: Any) -> EpochPlan:
    given = {"seed": 0, "rank": 0, "world_size": 1, "drop_last": True} | options
    return EpochPlan("root", tuple(shards), shuffle, batch_size=batch, **given)


def test_the_window_that_is_named_is_enough() -> None:
    shards = (60,) * 1000
    few = shuffle_quality(plan_of(LocalShuffle(500), shards=shards), SORTED, 0)

    assert few.sentence.startswith("Not well mixed: batches hold ")
    assert few.least_window is not None
    assert f"use a LocalShuffle of at least {few.least_window:,} records, GlobalShuffle()" in few.sentence
    enough = shuffle_quality(plan_of(LocalShuffle(few.least_window), shards=shards), SORTED, 0)
    assert enough.classes.found >= 0.88 * enough.classes.expected
    assert enough.least_window is None


def test_mixed_shards_need_a_window_much_larger_than_a_batch() -> None:
    small, large = (shuffle_quality(plan_of(LocalShuffle(window)), MIXED, 0) for window in (300, 30_000))

    assert "times as often as by chance; use a larger window" in small.sentence
    assert not small.is_full
    assert large.is_full


def test_stored_order_has_the_same_batches_in_every_epoch() -> None:
    found = shuffle_quality(plan_of(None), MIXED, 0)

    assert found.sentence.startswith("Every epoch has the same batches")
    assert found.displacement.mean == 0
    assert found.stored_neighbours is not None
    assert found.stored_neighbours.found == 1


def test_an_epoch_without_a_full_batch_has_no_quality() -> None:
    with pytest.raises(UsageError, match="no full batch of 64 records"):
        shuffle_quality(plan_of(None, shards=(10,), drop_last=False), np.zeros(10, int), 0)


def test_a_loader_measures_its_subset_without_reading(lmdb_shards: Path) -> None:
    with Loader(
        lmdb_shards, batch_size=8, records=np.arange(20, 120), shuffle=GlobalShuffle(), workers=0
    ) as loader:
        found = loader.shuffle_quality(epoch=3)
        labels = loader.dataset.index["label"][20:120]

        assert isinstance(found, ShuffleQuality)
        assert (found.records, found.batches) == (100, 12)
        assert found.classes.expected == expected_classes(labels, 8)
        assert found != loader.shuffle_quality(epoch=4)
        assert json.loads(json.dumps(found.to_json()))["sentence"] == str(found)
        assert not loader.stats().batches
