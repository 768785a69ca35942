"""Properties of an epoch's order: how far records move, and what an order takes."""

from __future__ import annotations

import pickle
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from shardprep.formats.errors import UsageError
from shardprep.loaders.order.epoch_order import GlobalShuffle, LocalShuffle, RankSplit, epoch_order
from shardprep.loaders.order.parts import MAX_RECORDS, Records
from support.buffer_shuffle import buffer_shuffled, spread

shuffles = st.none() | st.just(GlobalShuffle()) | st.builds(LocalShuffle, st.integers(1, 200))
seeds = st.integers(0, (1 << 64) - 1)
IMAGENET = [1281] * 1000 + [167]


def whole(counts: list[int], **options: Any) -> Records:
    return epoch_order(counts, **options)[:]


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


def test_a_full_permutation_puts_every_record_everywhere():
    orders = [whole([4], shuffle=GlobalShuffle(), seed=1, epoch=e).tolist() for e in range(2400)]

    counts = {tuple(order): 0 for order in orders}
    for order in orders:
        counts[tuple(order)] += 1
    assert len(counts) == 24
    assert 50 < min(counts.values()) <= max(counts.values()) < 160


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
