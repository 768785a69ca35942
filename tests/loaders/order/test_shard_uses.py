"""When an epoch uses shards, beside the records of its batches."""

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, strategies as st

from shardprep.formats.errors import UsageError
from shardprep.loaders.order import shard_uses as module
from shardprep.loaders.order.epoch import EpochPlan
from shardprep.loaders.order.epoch_order import GlobalShuffle, LocalShuffle, Shuffle
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
