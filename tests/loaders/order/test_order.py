"""Properties of an epoch's order: how far records move, and what an order takes."""

from __future__ import annotations

from typing import Any

import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders.order.epoch_order import LocalShuffle, RankSplit, epoch_order
from shardprep.loaders.order.parts import MAX_RECORDS, Records


def whole(counts: list[int], **options: Any) -> Records:
    return epoch_order(counts, **options)[:]


@pytest.mark.parametrize("window", [0, -1, "2 gigs", "GiB", "-1GiB", "0MB", ""])
def test_a_window_that_means_nothing_is_refused(window):
    with pytest.raises(UsageError, match="window"):
        LocalShuffle(window)


def test_a_window_of_bytes_is_no_window_before_the_mean_size_is_known():
    with pytest.raises(UsageError, match="in_records"):
        whole([10], shuffle=LocalShuffle("1KB"), seed=0, epoch=0)


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
