"""The order of any range, computed in blocks, is that of the order computed whole."""

from __future__ import annotations

import tracemalloc
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from whole_order import displaced, whole_order

from shardprep.loaders.order import partitions
from shardprep.loaders.order.displaced_order import MAX_RECORDS, DisplacedOrder, Records
from shardprep.loaders.order.epoch import Epoch, EpochPlan
from shardprep.loaders.order.epoch_order import GlobalShuffle, LocalShuffle, Shuffle, epoch_order
from shardprep.loaders.order.rank_split import RankSplit
from shardprep.loaders.order.rng import Purpose, keyed_bits

shard_counts = st.lists(st.integers(0, 60), max_size=8)
shuffles = st.none() | st.just(GlobalShuffle()) | st.builds(LocalShuffle, st.integers(1, 500))
words = st.integers(0, (1 << 64) - 1)
blocks = st.integers(1, 100)  # places in one, so that there are many


@given(
    counts=shard_counts,
    shuffle=shuffles,
    seed=words,
    epoch=words,
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
    expected = whole_order(counts, shuffle=shuffle, seed=seed, epoch=epoch)
    with patch.object(partitions, "BLOCK", block):
        order = epoch_order(counts, shuffle=shuffle, seed=seed, epoch=epoch)
    places = data.draw(st.lists(st.integers(0, len(expected) - 1), max_size=30)) if len(expected) else []

    assert len(order) == len(expected)
    for start, stop in ends:  # of one order, whose blocks come and go
        np.testing.assert_array_equal(order[start:stop], expected[start:stop], strict=True)
    assert list(order.each(places)) == expected[places].tolist()


@given(
    counts=shard_counts.filter(lambda counts: sum(counts) >= 48),
    shuffle=shuffles,
    batch_size=st.integers(1, 12),
    world_size=st.integers(1, 4),
    drop_last=st.booleans(),
    start=st.integers(0, 48),
    block=blocks,
)
def test_every_batch_of_every_rank_is_that_of_the_whole_order_wherever_an_epoch_continues(
    counts: list[int],
    shuffle: Shuffle | None,
    batch_size: int,
    world_size: int,
    drop_last: bool,
    start: int,
    block: int,
) -> None:
    expected = whole_order(counts, shuffle=shuffle, seed=5, epoch=2)
    for rank in range(world_size):
        plan = EpochPlan("x", tuple(counts), shuffle, 5, batch_size, rank, world_size, drop_last)
        split = RankSplit(len(expected), batch_size, rank, world_size, drop_last, start)
        places = [split.batch(step) for step in range(len(split))]
        with patch.object(partitions, "BLOCK", block):
            epoch = Epoch(plan, 2, start=start)
            batches = list(epoch.batches())

        assert [batch.tolist() for batch in batches] == [expected[list(at)].tolist() for at in places]


def range_of(count: int, window: int, start: int, stop: int) -> list[int]:
    """The order of a range, from the definition: keys i + window * u of all that may lie there."""
    low, high = max(0, start - 2 * window), min(count, stop + 2 * window)
    bits = keyed_bits(Purpose.RECORD_ORDER, seed=3, epoch=4)
    bits.advance(low // 4)
    drawn = bits.random_raw(high - low // 4 * 4)[low % 4 :].tolist()
    fraction = min(32, 63 - 2 * count.bit_length())
    keys = {i: (i << fraction) + ((u >> 32) * window >> 32 - fraction) for i, u in enumerate(drawn, low)}
    return sorted(keys, key=lambda i: (keys[i], i))[start - low : stop - low]


@pytest.mark.parametrize("count", [10**9, MAX_RECORDS])
@pytest.mark.parametrize("share", [0, 0.37, 1])
def test_a_range_of_10_to_the_9_is_that_of_the_definition_in_the_memory_of_a_window(
    count: int, share: float
) -> None:
    window, start = 3000, int(share * (count - 1000))
    order = DisplacedOrder(count, window=window, bits=keyed_bits(Purpose.RECORD_ORDER, seed=3, epoch=4))
    tracemalloc.start()
    try:
        found = order[start : start + 1000]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert found.tolist() == range_of(count, window, start, start + 1000)
    assert peak < 10e6


def counting_blocks(computed: list[int]) -> DisplacedOrder:
    """The order of 1,000 numbers in blocks of 20, which are noted when they are computed."""

    def stream(start: int, stop: int) -> Records:
        computed.append(start)
        return np.arange(start, stop)

    bits = keyed_bits(Purpose.FLOW, seed=0, epoch=0)
    return DisplacedOrder(1000, window=10, bits=bits, stream=stream, block=20)


def test_an_epoch_in_order_computes_each_block_once() -> None:
    order = counting_blocks(computed := [])
    for start in range(0, 1000, 7):
        order[start : start + 7]

    assert len(computed) == len(set(computed)) == 51


def test_places_at_random_compute_about_twice_the_blocks_that_there_are() -> None:
    order = counting_blocks(computed := [])
    places = np.random.default_rng(0).permutation(1000)
    whole = displaced(1000, window=10, bits=keyed_bits(Purpose.FLOW, seed=0, epoch=0))

    assert list(order.each(places.tolist())) == whole[places].tolist()
    assert len(computed) <= 2 * 51 + 3
