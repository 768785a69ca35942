"""Receipts as proof of exactly-once delivery, over any number of ranks and parts."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from shardprep.formats.errors import DataError, UsageError
from shardprep.loaders.order.receipt import Receipt

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
