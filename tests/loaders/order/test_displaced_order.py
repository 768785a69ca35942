"""The order of any range, computed in blocks, is that of the order computed whole."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, strategies as st

from shardprep.loaders import Receipt
from shardprep.loaders.order import parts as partition_module
from shardprep.loaders.order.epoch import Epoch, EpochPlan, resumed
from shardprep.loaders.order.epoch_order import GlobalShuffle, LocalShuffle, Shuffle, epoch_order
from shardprep.loaders.order.parts import MAX_RECORDS, DisplacedOrder, Records
from shardprep.loaders.order.receipt import Tally
from shardprep.loaders.order.rng import Purpose, keyed_bits
from support.whole_order import Ranks, displaced, whole_order

shard_counts = st.lists(st.integers(0, 60), max_size=8)
shuffles = (
    st.none() | st.just(GlobalShuffle()) | st.builds(LocalShuffle, st.integers(1, 500), st.integers(1, 6))
)
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
    with patch.object(partition_module, "BLOCK", block):
        order = epoch_order(counts, shuffle=shuffle, seed=seed, epoch=epoch)
    places = data.draw(st.lists(st.integers(0, len(expected) - 1), max_size=30)) if len(expected) else []

    assert len(order) == len(expected)
    for start, stop in ends:  # of one order, whose blocks come and go
        np.testing.assert_array_equal(order[start:stop], expected[start:stop], strict=True)
    assert list(order.each(places)) == expected[places].tolist()


@given(
    counts=shard_counts.filter(lambda counts: sum(counts) >= 48).map(tuple),
    shuffle=shuffles,
    over=st.builds(Ranks, world=st.integers(1, 4), batch=st.integers(1, 12), drop_last=st.booleans()),
    later=st.builds(Ranks, world=st.integers(1, 4), batch=st.integers(1, 12), drop_last=st.booleans()),
    done=st.integers(0, 12),
    block=blocks,
)
def test_every_batch_of_every_rank_is_that_of_the_whole_order_wherever_an_epoch_goes_on(
    counts: tuple[int, ...], shuffle: Shuffle | None, over: Ranks, later: Ranks, done: int, block: int
) -> None:
    records, partitions = sum(counts), shuffle.partitions if shuffle else 1
    expected = whole_order(counts, shuffle=shuffle, seed=5, epoch=2)
    over, later = over.fitting(records, partitions), later.fitting(records, partitions)
    state: dict[str, Any] = {}
    receipts, delivered = list[Receipt](), list[int]()
    for ranks in (over, later):
        steps = ranks.steps(records, partitions, state.get("place", 0))
        steps = steps[: done if ranks is over else None]
        epochs = []
        for rank in range(ranks.world):
            plan = EpochPlan("x", counts, shuffle, 5, ranks.batch, rank, ranks.world, ranks.drop_last)
            with patch.object(partition_module, "BLOCK", block):
                epoch = resumed(plan, state) if state else Epoch(plan, 2)
                batches = list(epoch.batches())[: len(steps)]
            wanted = [expected[step[rank]].tolist() for step in steps if step[rank]]
            assert [batch.tolist() for batch in batches] == wanted
            for batch in batches:
                assert batch.dtype == np.int64
                epoch.delivered(batch, [])
            if ranks is later:
                epoch.end()
                assert epoch.is_over
            delivered += [number for batch in wanted for number in batch]
            epochs.append(epoch)
        is_carried = ranks is over and over.world == later.world  # the first rank goes on with its receipt
        receipts += [epoch.receipt for epoch in epochs[is_carried:]]
        if ranks is over:
            state = json.loads(json.dumps(epochs[0].state()))
            receipts = [replace(receipt, left_out=Tally()) for receipt in receipts]

    left_out = records - later.stop(records, state["place"])
    assert sorted([*delivered, *expected[records - left_out :].tolist()]) == list(range(records))
    Receipt.merge(receipts).check(records, left_out=left_out)


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
