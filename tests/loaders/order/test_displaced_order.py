"""The order of any range, computed in blocks, is that of the order computed whole."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
from hypothesis import given, strategies as st

from shardprep.loaders.order import parts as partition_module
from shardprep.loaders.order.epoch_order import GlobalShuffle, LocalShuffle, Shuffle, epoch_order
from support.whole_order import whole_order

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
