"""Orders without some of their records or steps, shards' uses, mixing and receipts: against brute force."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

from shardprep import Loader
from shardprep.formats.errors import DataError, UsageError
from shardprep.loaders.order.epoch import (
    Epoch,
    EpochPlan,
    GlobalShuffle,
    LocalShuffle,
    ShardUses,
    Shuffle,
    parse_ranges,
    peak_use,
    shard_uses,
    subtract_passed,
)
from shardprep.loaders.order.parts import DisplacedOrder, Omission
from shardprep.loaders.order.quality import ShuffleQuality, expected_classes, shuffle_quality
from shardprep.loaders.order.receipt import Receipt
from support.memory import memory_below


@st.composite
def omissions(draw: st.DrawFn) -> tuple[EpochPlan, EpochPlan, list[int]]:
    """A plan of all records, one that closes the gaps of some, and these."""
    counts = tuple(draw(st.lists(st.integers(0, 30), min_size=1, max_size=9)))
    records = draw(st.sets(st.integers(0, max(0, sum(counts) - 1)), max_size=40)) if sum(counts) else set()
    shuffle = draw(st.sampled_from([None, *map(LocalShuffle, (1, 7, 40)), GlobalShuffle()]))
    whole = plan(counts, shuffle, batch_size=1, drop_last=False)
    numbers = np.array(sorted(records), np.int64)
    without = replace(whole, omission=Omission(numbers, closes_gaps=True)) if records else whole
    return whole, without, sorted(records)


@given(omissions(), st.data())
@settings(deadline=None)
def test_a_closed_order_is_that_of_all_without_the_records(found: Any, data: st.DataObject) -> None:
    whole, without, records = found
    expected = [number for number in whole.order(2)[:].tolist() if number not in records]
    order = without.order(2)

    assert len(order) == without.places == len(expected)
    assert order[:].tolist() == expected
    start, stop = sorted(data.draw(st.lists(st.integers(0, len(expected)), min_size=2, max_size=2)))
    assert order[start:stop].tolist() == expected[start:stop]
    places = data.draw(st.lists(st.integers(0, len(expected) - 1), max_size=5)) if expected else []
    assert list(order.numbers_at(places)) == [expected[place] for place in places]


@given(
    ranges=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), max_size=4), place=st.integers(0, 100)
)
def test_places_within_and_outside_of_passed_ranges_are_each_others_inverse(
    ranges: list[tuple[int, int]], place: int
) -> None:
    passed, end = [], 0
    for gap, length in ranges:
        passed.append((end + gap, end + gap + length))
        end = passed[-1][1]
    some = replace(plan((200,), None), passed=tuple(passed))
    removed = {at for start, stop in passed for at in range(start, stop)}

    if all(gap for gap, _ in ranges[1:]):
        assert parse_ranges([[*both] for both in passed], end) == some.passed
    assert subtract_passed(passed, place) == sum(1 for at in range(place) if at not in removed)
    assert subtract_passed(passed, some.add_passed(place)) == place
    if place - 1 not in removed and place not in removed:
        assert some.add_passed(subtract_passed(passed, place)) == place


@given(omissions())
@settings(deadline=None, max_examples=40)
def test_the_shards_of_each_step_are_foreseen(found: Any) -> None:
    _, without, _ = found
    if not without.places:
        return
    without = replace(without, batch_size=3)
    if without.places > 12:
        without = without.skip_steps([1, 3], start=0)
    uses, ends = shard_uses(without, 2), np.cumsum(without.shard_counts)

    for step, numbers in enumerate(Epoch(without, 2).batches()):
        assert set(np.searchsorted(ends, numbers, side="right").tolist()) <= set(uses.at(step).tolist())


HOME = {"dataset": "sha256:abc", "epoch": 3}
EMPTY = Receipt(**HOME)


def receipt(records) -> Receipt:
    return Receipt.of(records, **HOME)


@given(records=st.permutations(range(40)), cuts=st.lists(st.integers(0, 40), max_size=6))
def test_any_order_in_any_batches_over_any_ranks_is_the_same_receipt(records, cuts):
    parts = [records[a:b] for a, b in pairwise([0, *sorted(cuts), 40])]
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


def test_a_receipt_of_nothing_blesses_nothing_and_no_receipts_do_not_merge():
    with pytest.raises(DataError, match="delivered 0 of 300"):
        EMPTY.leave_out(range(300)).check(300)
    with pytest.raises(DataError, match="some were delivered more than once"):
        EMPTY.add([0, 0]).check(2)
    with pytest.raises(UsageError, match="none"):
        Receipt.merge([])


@pytest.mark.parametrize(
    "damage",
    [
        *({"epoch": epoch} for epoch in ("3", -1)),
        *({"skipped": numbers} for numbers in (3, [-1], [1 << 63])),
        {"delivered": {}},
        *({"delivered": {"count": 1, "digest": digest}} for digest in ("12", "1" * 33, "x" * 32, 12)),
    ],
)
def test_what_is_no_receipt_is_refused(damage):
    with pytest.raises(DataError, match="not a receipt"):
        Receipt.from_json(EMPTY.to_json() | damage)


@st.composite
def plans(draw: st.DrawFn) -> EpochPlan:
    counts = tuple(draw(st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(any)))
    partitions = draw(st.sampled_from([1, 1, 2, 4]))
    window = draw(st.integers(1, 150))
    shuffle = draw(st.sampled_from([None, GlobalShuffle(), LocalShuffle(window, partitions=partitions)]))
    world_size = draw(st.sampled_from([1, 2, 4]))
    options = {"batch_size": draw(st.integers(1, 6)) * partitions, "drop_last": draw(st.booleans())}
    options |= {"rank": draw(st.integers(0, world_size - 1)), "world_size": world_size}
    with suppress(UsageError):
        return plan(counts, shuffle, **options)
    return plan((64,) * 8, None, **options)


def plan(counts: Sequence[int], shuffle: Shuffle | None, batch_size: int = 64, **options: Any) -> EpochPlan:
    given = {"rank": 0, "world_size": 1, "drop_last": True} | options
    return EpochPlan("root", tuple(counts), shuffle, seed=0, batch_size=batch_size, **given)


@given(plans(), st.data())
def test_the_peak_is_the_largest_sum_of_sizes_at_one_step(plan: EpochPlan, data: st.DataObject) -> None:
    shards = len(plan.shard_counts)
    sizes = np.array(data.draw(st.lists(st.integers(0, 99), min_size=shards, max_size=shards)), np.int64)
    uses = shard_uses(plan, 0)
    assert uses.peak(sizes) == max(int(sizes[uses.at(step)].sum()) for step in range(len(plan.split(0))))


def test_the_peak_of_a_training_is_that_of_many_epochs() -> None:
    skewed, ones = plan((4, 60, 60) * 33, LocalShuffle(300), 8), np.ones(99, np.int64)
    peaks = [shard_uses(skewed, epoch).peak(ones) for epoch in range(99)]
    assert max(peaks[:2]) < max(peaks) <= peak_use(skewed, ones)


@pytest.mark.parametrize("partitions", [1, 4])
def test_bounds_hold_all_uses_and_are_near_them(partitions: int) -> None:
    big = plan((500,) * 400, LocalShuffle(20_000, partitions=partitions), 256, rank=1, world_size=2)
    first, last = by_shard(shard_uses(big, 1)), by_shard(shard_uses(big, 1, exact_records=0))
    assert set(first) <= set(last)
    steps = len(big.split(0))
    for shard, (begin, end) in first.items():
        assert 0 <= begin - last[shard][0] < 0.05 * steps
        assert 0 <= last[shard][1] - end < 0.05 * steps


def by_shard(uses: ShardUses) -> dict[int, tuple[int, int]]:
    rows = zip(uses.shards.tolist(), uses.firsts.tolist(), uses.lasts.tolist(), strict=True)
    return {shard: (first, last) for shard, first, last in rows}


@given(plans(), st.integers(0, 9))
def test_a_quality_is_what_is_counted_in_the_batches_of_two_epochs(plan: EpochPlan, seed: int) -> None:
    assume(plan.partitions == 1)
    labels = np.random.default_rng(seed).integers(0, 5, sum(plan.shard_counts))
    whole = plan.with_full_batches
    first, second = ([batch.tolist() for batch in Epoch(whole, n).batches()] for n in (1, 2))
    first, second = ([batch for batch in each if len(batch) == plan.batch_size] for each in (first, second))
    assume(first)
    place = {number: at for at, number in enumerate(plan.order(1)[:].tolist())}
    step = {number: at for at, batch in enumerate(second) for number in batch}
    delivered = sorted(number for batch in first for number in batch)

    found = shuffle_quality(plan, labels, 1)

    classes = [len({*labels[batch].tolist()}) for batch in first]
    pairs = [both for batch in first for both in pairwise(batch)]
    again = [a in step and step[a] == step.get(b) for a, b in pairs]
    assert (found.batches, found.fewest) == (len(first), min(classes))
    assert found.displacement.mean == pytest.approx(np.mean([abs(place[n] - n) for n in delivered]))
    means = [np.mean(each) for each in (classes, again or [0], [number in step for number in delivered])]
    assert [found.classes.found, found.meet_again.found, found.kept.found] == pytest.approx(means)
    apart = [abs(place[b] - place[a]) for a, b in pairwise(delivered) if b == a + 1]
    assert (found.stored_neighbours is None) == (plan.world_size > 1 or not apart)
    assert not found.stored_neighbours or found.stored_neighbours.found == pytest.approx(np.mean(apart))


RECORDS, CLASSES = 60_000, 100
SHARDS = (500,) * (RECORDS // 500)
SORTED = np.arange(RECORDS) * CLASSES // RECORDS
MIXED = np.random.default_rng(1).permutation(SORTED)


def test_the_window_that_is_named_is_enough() -> None:
    shards = (60,) * 1000
    few = shuffle_quality(plan(shards, LocalShuffle(500)), SORTED, 0)

    assert few.sentence.startswith("Not well mixed: batches hold ")
    assert few.least_window is not None
    assert f"use a LocalShuffle of at least {few.least_window:,} records, GlobalShuffle()" in few.sentence
    enough = shuffle_quality(plan(shards, LocalShuffle(few.least_window)), SORTED, 0)
    assert (enough.classes.found >= 0.88 * enough.classes.expected, enough.least_window) == (True, None)


def test_mixed_shards_need_a_window_much_larger_than_a_batch() -> None:
    small, large = (shuffle_quality(plan(SHARDS, LocalShuffle(window)), MIXED, 0) for window in (300, 30_000))

    assert "times as often as by chance; use a larger window" in small.sentence
    assert (small.is_full, large.is_full) == (False, True)


def test_few_batches_of_a_full_shuffle_have_enough_classes() -> None:
    few, labels = plan((30,), GlobalShuffle(), batch_size=4), np.arange(30) // 3
    assert all(shuffle_quality(few, labels, epoch).has_enough_classes for epoch in range(200))


def test_stored_order_has_the_same_batches_in_every_epoch() -> None:
    found = shuffle_quality(plan(SHARDS, None), MIXED, 0)

    assert found.sentence.startswith("Every epoch has the same batches")
    assert found.displacement.mean == 0
    assert found.to_json()["stored_neighbours"]["found"] == 1


def test_an_epoch_without_a_full_batch_has_no_quality() -> None:
    with pytest.raises(UsageError, match="no full batch of 64 records"):
        shuffle_quality(plan((10,), None, drop_last=False), np.zeros(10, int), 0)


def test_a_loader_measures_its_subset_without_reading(lmdb_shards: Path) -> None:
    with Loader(
        lmdb_shards, batch_size=8, records=np.arange(20, 120), shuffle=GlobalShuffle(), workers=0
    ) as loader:
        found = loader.shuffle_quality(epoch=3)
        labels = loader.dataset.index["label"][20:120]

        assert (type(found), found.records, found.batches) == (ShuffleQuality, 100, 12)
        assert found.classes.expected == expected_classes(labels, 8)
        assert found != loader.shuffle_quality(epoch=4)
        assert json.loads(json.dumps(found.to_json()))["sentence"] == str(found)
        assert not loader.stats().batches


def test_an_order_that_is_read_forward_holds_few_of_its_blocks():
    order = DisplacedOrder(1 << 22, window=100, bits=np.random.Philox(0))
    with memory_below(8 << 20):
        assert len({*order.numbers_at(range(0, len(order), 1 << 16))}) == 64
