"""Properties of an epoch's order and of its split over ranks."""

from __future__ import annotations

import pickle
import tracemalloc
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from buffer_shuffle import buffer_shuffled, spread
from hypothesis import given
from hypothesis import strategies as st

from shardprep.formats.errors import UsageError
from shardprep.loaders.order.displaced_order import MAX_RECORDS, Records
from shardprep.loaders.order.epoch_order import GlobalShuffle, LocalShuffle, epoch_order
from shardprep.loaders.order.rank_split import RankSplit

shard_counts = st.lists(st.integers(0, 40), max_size=8)
shuffles = st.none() | st.just(GlobalShuffle()) | st.builds(LocalShuffle, st.integers(1, 200))
seeds = st.integers(0, (1 << 64) - 1)
IMAGENET = [1281] * 1000 + [167]


def whole(counts: list[int], **options: Any) -> Records:
    return epoch_order(counts, **options)[:]


def batches(split: RankSplit) -> list[range]:
    return [split.batch(step) for step in range(len(split))]


def places(splits: list[RankSplit]) -> list[int]:
    return sorted(place for split in splits for batch in batches(split) for place in batch)


def ranks(world_size: int, **options: int) -> list[RankSplit]:
    return [RankSplit(rank=r, world_size=world_size, **options) for r in range(world_size)]


@given(counts=shard_counts, shuffle=shuffles, seed=seeds, epoch=seeds)
def test_every_record_comes_exactly_once(counts, shuffle, seed, epoch):
    order = whole(counts, shuffle=shuffle, seed=seed, epoch=epoch)

    assert order.dtype == np.int64
    assert sorted(order) == list(range(sum(counts)))


def test_a_window_of_600_over_1000_records_loses_none():
    order = whole([1000], shuffle=LocalShuffle(600), seed=0, epoch=0)

    assert len(set(order.tolist())) == 1000


@given(count=st.integers(1, 300), window=st.integers(1, 300), seed=seeds)
def test_a_record_moves_less_than_the_window(count, window, seed):
    order = whole([count], shuffle=LocalShuffle(window), seed=seed, epoch=0)

    assert np.abs(order - np.arange(count)).max() < window


@given(count=st.integers(1, 300), window=st.integers(1, 300), seed=seeds)
def test_what_is_open_at_any_moment_spans_no_more_than_the_window(count, window, seed):
    order = whole([count], shuffle=LocalShuffle(window), seed=seed, epoch=0)
    last_read = np.maximum.accumulate(order)[:-1]
    first_unread = np.minimum.accumulate(order[::-1])[::-1][1:]

    assert np.all(last_read - first_unread < window)


def test_records_move_by_up_to_half_the_window_either_way():
    window = 1000
    order = whole([100_000], shuffle=LocalShuffle(window), seed=0, epoch=0)
    displacement = np.abs(order - np.arange(100_000))

    assert 0.45 * window < displacement[window:-window].max() < 0.55 * window
    assert displacement.mean() == pytest.approx(window / 4, rel=0.05)


def test_adjacent_records_swap_even_in_the_smallest_window():
    order = whole([10_000], shuffle=LocalShuffle(2), seed=0, epoch=0)

    swapped = np.count_nonzero(order != np.arange(10_000))
    assert 1_000 < swapped < 5_000


@given(counts=shard_counts, seed=seeds)
def test_a_window_of_one_gives_whole_shards_in_random_order(counts, seed):
    order = whole(counts, shuffle=LocalShuffle(1), seed=seed, epoch=0).tolist()
    starts = np.cumsum([0, *counts]).tolist()
    shards = [list(range(a, b)) for a, b in pairwise(starts) if a < b]

    while order:
        shard = next(s for s in shards if s[0] == order[0])
        assert order[: len(shard)] == shard
        del order[: len(shard)]


def test_a_full_permutation_puts_every_record_everywhere():
    orders = [whole([4], shuffle=GlobalShuffle(), seed=1, epoch=e).tolist() for e in range(2400)]

    counts = {tuple(order): 0 for order in orders}
    for order in orders:
        counts[tuple(order)] += 1
    assert len(counts) == 24
    assert 50 < min(counts.values()) <= max(counts.values()) < 160


def test_a_window_of_everything_is_the_global_shuffle():
    local = whole([30, 40], shuffle=LocalShuffle(70), seed=3, epoch=4)
    everything = whole([30, 40], shuffle=GlobalShuffle(), seed=3, epoch=4)

    np.testing.assert_array_equal(local, everything)


@pytest.mark.parametrize("shuffle", [LocalShuffle(50), GlobalShuffle()])
def test_seed_and_epoch_decide_and_nothing_else(shuffle):
    def order(seed, epoch):
        return whole([100, 100], shuffle=shuffle, seed=seed, epoch=epoch).tolist()

    assert order(1, 2) == order(1, 2)
    assert len({tuple(order(s, e)) for s in range(4) for e in range(4)}) == 16


def test_the_order_is_the_same_as_ever():
    local = whole([4, 4, 4], shuffle=LocalShuffle(3), seed=7, epoch=1)
    everything = whole([4, 4, 4], shuffle=GlobalShuffle(), seed=7, epoch=1)

    assert local.tolist() == [9, 8, 10, 11, 0, 1, 2, 4, 3, 6, 5, 7]
    assert everything.tolist() == [11, 8, 4, 1, 3, 10, 2, 9, 6, 7, 0, 5]


@pytest.mark.parametrize("shuffle", [LocalShuffle(50_000), LocalShuffle(1_281_166), GlobalShuffle()])
def test_the_order_of_imagenet_takes_less_than_50_mb(shuffle):
    tracemalloc.start()
    try:
        order = whole(IMAGENET, shuffle=shuffle, seed=0, epoch=0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert len(order) == 1_281_167
    assert peak < 50e6


@pytest.mark.parametrize(
    ("window", "records"), [("2GiB", 19522), ("512MB", 4654), ("1.5KB", 1), (77, 77), ("0.5 TiB", 4_997_780)]
)
def test_a_window_of_bytes_is_counted_in_records_of_the_mean_size(window, records):
    assert LocalShuffle(window).in_records(110_000).window_of(1 << 30) == records


@pytest.mark.parametrize("window", [0, -1, "2 gigs", "GiB", "-1GiB", "0MB", ""])
def test_a_window_that_means_nothing_is_refused(window):
    with pytest.raises(UsageError, match="window"):
        LocalShuffle(window)


def test_a_window_of_bytes_is_no_window_before_the_mean_size_is_known():
    with pytest.raises(UsageError, match="in_records"):
        whole([10], shuffle=LocalShuffle("1KB"), seed=0, epoch=0)


@given(shuffle=shuffles)
def test_a_shuffle_travels_by_pickle(shuffle):
    assert pickle.loads(pickle.dumps(shuffle)) == shuffle  # noqa: S301


@pytest.mark.parametrize("seed", [-1, 1 << 64])
def test_a_seed_that_does_not_fit_is_refused(seed):
    with pytest.raises(UsageError, match="seed"):
        whole([10], shuffle=GlobalShuffle(), seed=seed, epoch=0)


def test_more_records_than_a_sort_key_holds_are_refused():
    with pytest.raises(UsageError, match="more than"):
        epoch_order([MAX_RECORDS, 1], shuffle=None, seed=0, epoch=0)


splits = {
    "records": st.integers(0, 500),
    "batch_size": st.integers(1, 40),
    "world_size": st.integers(1, 9),
}


@given(**splits)
def test_without_drop_last_the_ranks_together_have_every_place_once(records, batch_size, world_size):
    split = ranks(world_size, records=records, batch_size=batch_size)

    assert places(split) == list(range(records))
    assert all(0 < len(batch) <= batch_size for s in split for batch in batches(s))


@given(**splits)
def test_without_drop_last_the_ranks_differ_by_one_record_at_most(records, batch_size, world_size):
    split = ranks(world_size, records=records, batch_size=batch_size)

    totals = [sum(map(len, batches(s))) for s in split]
    assert max(totals) - min(totals) <= 1
    assert totals == sorted(totals, reverse=True)


@given(**splits)
def test_with_drop_last_every_rank_has_the_same_number_of_full_batches(records, batch_size, world_size):
    split = ranks(world_size, records=records, batch_size=batch_size, drop_last=True)

    steps = records // (world_size * batch_size)
    assert [len(s) for s in split] == [steps] * world_size
    assert places(split) == list(range(split[0].stop))
    assert all(len(batch) == batch_size for s in split for batch in batches(s))


@given(**splits, step=st.integers(0, 10))
def test_a_global_step_takes_the_ranks_places_side_by_side(records, batch_size, world_size, step):
    split = ranks(world_size, records=records, batch_size=batch_size)
    start = step * world_size * batch_size
    if start + world_size * batch_size > records:
        return

    assert [s.batch(step).start - start for s in split] == [r * batch_size for r in range(world_size)]


@given(**splits, later_world_size=st.integers(1, 9), drop_last=st.booleans(), data=st.data())
def test_another_world_size_continues_at_any_step(
    records, batch_size, world_size, later_world_size, drop_last, data
):
    before = ranks(world_size, records=records, batch_size=batch_size, drop_last=drop_last)
    if not len(before[0]):
        return
    step = data.draw(st.integers(0, len(before[0]) - 1))
    start = before[0].end(step)
    after = ranks(later_world_size, records=records, batch_size=batch_size, drop_last=drop_last, start=start)

    done = [p for s in before for b in batches(s)[: step + 1] for p in b]
    assert sorted(done) + places(after) == list(range(after[0].stop))


@given(**splits, drop_last=st.booleans(), data=st.data())
def test_the_same_world_size_continues_with_the_same_batches(
    records, batch_size, world_size, drop_last, data
):
    before = ranks(world_size, records=records, batch_size=batch_size, drop_last=drop_last)
    step = data.draw(st.integers(0, len(before[0])))
    start = before[0].end(step - 1) if step else 0
    after = ranks(world_size, records=records, batch_size=batch_size, drop_last=drop_last, start=start)

    assert [batches(s) for s in after] == [batches(s)[step:] for s in before]


@pytest.mark.parametrize("step", [-1, 4])
def test_a_step_outside_of_the_epoch_is_an_index_error(step):
    with pytest.raises(IndexError):
        RankSplit(records=10, batch_size=3).batch(step)


@pytest.mark.parametrize(
    "wrong", [{"batch_size": 0}, {"rank": 2}, {"rank": -1}, {"start": 11}, {"world_size": 0}]
)
def test_a_split_that_cannot_be_meant_is_refused(wrong):
    with pytest.raises(UsageError):
        RankSplit(**{"records": 10, "batch_size": 3, "world_size": 2} | wrong)


@pytest.mark.parametrize("size", [300, 3_000])
def test_a_window_spreads_records_as_far_as_tensorpacks_buffer_of_a_third(size):
    def in_window(window):
        order = whole([100 * size], shuffle=LocalShuffle(window), seed=0, epoch=0)
        return spread(order, edge=5 * size)

    buffer = spread(buffer_shuffled(100 * size, size, np.random.default_rng(0)), edge=5 * size)

    assert in_window(size) == pytest.approx(size / 12**0.5, rel=0.02)
    assert buffer == pytest.approx(0.83 * size, rel=0.03)
    assert in_window(3 * size) == pytest.approx(buffer, rel=0.08)
