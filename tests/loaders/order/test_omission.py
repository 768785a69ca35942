"""Orders without some of their records or steps, against lists; and receipts as proof of delivery."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from shardprep.formats.errors import DataError, UsageError
from shardprep.loaders.order.epoch import Epoch, EpochPlan
from shardprep.loaders.order.epoch_order import GlobalShuffle, LocalShuffle
from shardprep.loaders.order.omission import Omission
from shardprep.loaders.order.receipt import Receipt
from shardprep.loaders.order.shard_uses import shard_uses


def plan(counts: tuple[int, ...], **options: Any) -> EpochPlan:
    given = {"shuffle": None, "seed": 3, "batch_size": 1, "rank": 0, "world_size": 1, "drop_last": False}
    return EpochPlan(dataset="d", shard_counts=counts, **(given | options))


def order_of(some: EpochPlan, epoch: int = 2) -> list[int]:
    return some.order(epoch)[:].tolist()


shuffles = st.sampled_from([None, LocalShuffle(1), LocalShuffle(7), LocalShuffle(40), GlobalShuffle()])


@st.composite
def omissions(draw: st.DrawFn) -> tuple[EpochPlan, EpochPlan, list[int]]:
    """A plan of all records, one that closes the gaps of some, and these."""
    counts = tuple(draw(st.lists(st.integers(0, 30), min_size=1, max_size=9)))
    records = draw(st.sets(st.integers(0, max(0, sum(counts) - 1)), max_size=40)) if sum(counts) else set()
    whole = plan(counts, shuffle=draw(shuffles))
    numbers = np.array(sorted(records), np.int64)
    without = replace(whole, omission=Omission(numbers, closes=True)) if records else whole
    return whole, without, sorted(records)


@given(omissions(), st.data())
@settings(deadline=None)
def test_a_closed_order_is_that_of_all_without_the_records(found: Any, data: st.DataObject) -> None:
    whole, without, records = found
    expected = [number for number in order_of(whole) if number not in records]
    order = without.order(2)

    assert len(order) == without.places == len(expected)
    assert order[:].tolist() == expected
    start, stop = sorted(data.draw(st.lists(st.integers(0, len(expected)), min_size=2, max_size=2)))
    assert order[start:stop].tolist() == expected[start:stop]
    places = data.draw(st.lists(st.integers(0, len(expected) - 1), max_size=5)) if expected else []
    assert list(order.each(places)) == [expected[place] for place in places]


@given(omissions())
@settings(deadline=None, max_examples=40)
def test_the_shards_of_each_step_are_foreseen(found: Any) -> None:
    _, without, _ = found
    if not without.places:
        return
    without = replace(without, batch_size=3)
    if without.places > 12:
        without = without.passing([1, 3], start=0)
    uses, ends = shard_uses(without, 2), np.cumsum(without.shard_counts)

    for step, numbers in enumerate(Epoch(without, 2).batches()):
        shards = set(np.searchsorted(ends, numbers, side="right").tolist())
        assert shards <= set(uses.at(step).tolist())


HOME = {"dataset": "sha256:abc", "epoch": 3}
EMPTY = Receipt(**HOME)


def receipt(records) -> Receipt:
    return Receipt.of(records, **HOME)


@given(records=st.permutations(range(40)), cuts=st.lists(st.integers(0, 40), max_size=6))
def test_any_order_in_any_batches_over_any_ranks_is_the_same_receipt(records, cuts):
    edges = [0, *sorted(cuts), 40]
    parts = [records[a:b] for a, b in pairwise(edges)]
    in_batches = EMPTY
    for part in parts:
        in_batches = in_batches.add(part)

    assert in_batches == receipt(range(40)) == Receipt.merge(map(receipt, parts))
    in_batches.check(40)


@given(records=st.lists(st.integers(0, 30), max_size=40), total=st.integers(0, 31))
def test_a_check_passes_exactly_when_every_record_came_once(records, total):
    if sorted(records) == list(range(total)):
        receipt(records).check(total)
    else:
        with pytest.raises(DataError):
            receipt(records).check(total)


def test_a_receipt_of_nothing_blesses_nothing():
    with pytest.raises(DataError, match="delivered 0 of 300"):
        EMPTY.leave_out(range(300)).check(300)


def test_no_receipts_do_not_merge():
    with pytest.raises(UsageError, match="none"):
        Receipt.merge([])


@pytest.mark.parametrize(
    "damage",
    [
        {"epoch": "3"},
        {"epoch": -1},
        {"skipped": 3},
        {"skipped": [-1]},
        {"delivered": {}},
        {"delivered": {"count": 1, "digest": "12"}},
        {"delivered": {"count": 1, "digest": "x" * 32}},
        {"delivered": {"count": 1, "digest": 12}},
    ],
)
def test_what_is_no_receipt_is_refused(damage):
    with pytest.raises(DataError, match="not a receipt"):
        Receipt.from_json(EMPTY.to_json() | damage)
