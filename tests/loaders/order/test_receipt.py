"""Receipts as proof of exactly-once delivery, over any number of ranks and parts."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, strategies as st

from shardprep.formats.errors import DataError, UnknownVersion, UsageError
from shardprep.loaders.order.receipt import Receipt, Tally

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


def test_chunks_are_seamless():
    tally = Tally.of_dataset(200_000)

    assert tally == Tally.of(np.random.default_rng(0).permutation(200_000))
    assert tally.count == 200_000


def test_nothing_of_nothing_is_exactly_once():
    EMPTY.check(0)
    assert EMPTY.count == 0


@given(records=st.lists(st.integers(0, 30), max_size=40), total=st.integers(0, 31))
def test_a_check_passes_exactly_when_every_record_came_once(records, total):
    if sorted(records) == list(range(total)):
        receipt(records).check(total)
    else:
        with pytest.raises(DataError):
            receipt(records).check(total)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([0, 1, 2], "at least 2 of 5 records are missing"),
        ([0, 1, 2, 3, 4, 4], "at least 1 records were delivered more than once"),
        ([0, 1, 2, 3, 3], "as many records were delivered more than once as are missing"),
    ],
)
def test_the_error_counts_what_is_missing_and_what_is_repeated(records, message):
    with pytest.raises(DataError, match=message):
        receipt(records).check(5)


def test_a_check_of_too_few_records_names_the_number_that_the_epoch_has():
    epoch = receipt(range(8)).leave_out([8, 9])

    with pytest.raises(DataError, match=r"has 10 records, not 8; check\(10, left_out=2\) accepts that"):
        epoch.check(8)


def test_a_check_counts_what_was_delivered_and_names_what_was_skipped():
    partial = receipt([0, 1, 3]).skip([2])

    with pytest.raises(
        DataError, match=r"delivered 3 of 4.*left out 0, and 1 were skipped.*\(4, skipped=1\)"
    ):
        partial.check(4)
    partial.check(4, skipped=1)
    assert partial.skipped == (2,)
    assert partial.count == 3
    assert not partial.is_complete
    assert receipt(range(4)).is_complete


def test_a_check_counts_what_was_delivered_and_names_what_drop_last_left_out():
    partial = receipt(range(8)).leave_out([8, 9])

    with pytest.raises(DataError, match=r"delivered 8 of 10.*left out 2.*check\(10, left_out=2\) accepts"):
        partial.check(10)
    partial.check(10, left_out=2)


def test_a_receipt_of_nothing_blesses_nothing():
    with pytest.raises(DataError, match="delivered 0 of 300"):
        EMPTY.leave_out(range(300)).check(300)


@given(
    delivered=st.integers(0, 9),
    left_out=st.integers(0, 2),
    skipped=st.integers(0, 2),
    named=st.integers(0, 2),
)
def test_a_check_passes_exactly_with_the_numbers_of_records_that_are_missing(
    delivered, left_out, skipped, named
):
    records = range(delivered + left_out + skipped)
    some = receipt(records[:delivered]).leave_out(records[delivered:][:left_out])
    some = some.skip(records[delivered + left_out :])

    some.check(len(records), left_out=left_out, skipped=skipped)
    if named not in (left_out, skipped):
        for wrong in ({"left_out": named, "skipped": skipped}, {"left_out": left_out, "skipped": named}):
            with pytest.raises(DataError, match="accepts that"):
                some.check(len(records), **wrong)


def test_skipping_a_record_that_was_delivered_is_found():
    with pytest.raises(DataError):
        receipt([0, 1, 2]).skip([1]).check(4, skipped=1)


def test_what_drop_last_leaves_out_is_stated_once_for_all_ranks():
    ranks = [receipt(part).leave_out([8, 9]) for part in ([0, 1, 2, 3], [4, 5, 6, 7])]
    merged = Receipt.merge(ranks)

    with pytest.raises(DataError, match="delivered 8 of 10"):
        merged.check(10)
    merged.check(10, left_out=2)
    assert not merged.is_complete
    assert merged.left_out.count == 2


def test_parts_of_a_resumed_epoch_merge_though_only_the_last_reached_the_end():
    merged = Receipt.merge([receipt(range(5)), receipt(range(5, 8)).leave_out([8, 9])])

    merged.check(10, left_out=2)


def test_a_rank_that_is_missing_or_given_twice_is_found():
    first, second = receipt(range(5)), receipt(range(5, 10))

    for ranks in ([first], [first, first], [first, second, second]):
        with pytest.raises(DataError, match="exactly once"):
            Receipt.merge(ranks).check(10)


@pytest.mark.parametrize(
    "other",
    [
        Receipt("sha256:other", 3),
        Receipt("sha256:abc", 4),
        EMPTY.leave_out([1]),
    ],
)
def test_receipts_that_do_not_belong_together_do_not_merge(other):
    with pytest.raises(UsageError, match=r"dataset|epoch|left_out"):
        Receipt.merge([EMPTY.leave_out([2]), other])


def test_no_receipts_do_not_merge():
    with pytest.raises(UsageError, match="none"):
        Receipt.merge([])


def test_a_receipt_travels_as_json():
    original = receipt(range(7)).skip([9, 8]).leave_out([7])

    copy = Receipt.from_json(json.loads(json.dumps(original.to_json())))

    assert copy == original
    copy.check(10, left_out=1, skipped=2)


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


def test_a_receipt_of_another_version_is_refused():
    with pytest.raises(UnknownVersion):
        Receipt.from_json(EMPTY.to_json() | {"version": 2})
