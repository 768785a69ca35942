"""The laws of parts by weight: exact shares of each epoch, and every record equally often over the epochs."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st

from shardprep.formats.errors import UsageError
from shardprep.loaders.order.parts import WeightedParts, shared_out

RECORDS = st.lists(st.integers(1, 60), min_size=1, max_size=5)
WEIGHTS = st.one_of(st.integers(1, 1000), st.floats(1e-3, 1e3))


@st.composite
def weighted(draw: st.DrawFn) -> WeightedParts:
    records = draw(RECORDS)
    names = [f"part-{number}" for number in range(len(records))]
    weights = {name: draw(WEIGHTS) for name in names}
    shares = [Fraction(weight) for weight in weights.values()]
    assume(all(shared_out(sum(records), shares)))
    return WeightedParts.of(weights, names, records)


@given(st.integers(0, 10**10), st.lists(st.fractions(Fraction(1, 999), 999), min_size=1, max_size=6))
def test_shares_add_up_and_are_off_by_less_than_one(total: int, shares: list[Fraction]) -> None:
    counts = shared_out(total, shares)

    assert sum(counts) == total
    assert all(
        abs(count - total * share / sum(shares)) < 1 for count, share in zip(counts, shares, strict=True)
    )


@given(weighted(), st.integers(0, 1 << 63))
def test_each_part_has_its_places_of_an_epoch_and_no_record_comes_twice_as_often(
    parts: WeightedParts, epoch: int
) -> None:
    found = parts.positions(np.arange(sum(parts.places)), epoch)

    counts = np.bincount(found, minlength=sum(parts.records))
    for own, places in zip(np.split(counts, np.cumsum(parts.records)[:-1]), parts.places, strict=True):
        assert own.sum() == places
        assert own.max() - own.min() <= 1


@given(weighted(), st.integers(0, 1000), st.integers(1, 20))
def test_over_epochs_every_record_of_a_part_comes_equally_often_but_for_one_time(
    parts: WeightedParts, first: int, epochs: int
) -> None:
    places = np.arange(sum(parts.places))
    found = np.concatenate([parts.positions(places, epoch) for epoch in range(first, first + epochs)])

    counts = np.bincount(found, minlength=sum(parts.records))
    for own in np.split(counts, np.cumsum(parts.records)[:-1]):
        assert own.max() - own.min() <= 1


@given(weighted(), st.data())
def test_blocks_have_all_places_and_none_is_larger_than_a_shard(
    parts: WeightedParts, data: st.DataObject
) -> None:
    counts = []
    for records in parts.records:
        cuts = data.draw(st.sets(st.integers(0, records), max_size=4))
        counts.append(np.diff(sorted({0, records} | cuts)).tolist())

    blocks = parts.blocks(counts)

    assert sum(blocks) == sum(parts.places) == sum(parts.records)
    assert min(blocks) > 0
    assert max(blocks) <= max(max(own) for own in counts)


@given(weighted(), st.integers(0, 99), st.data())
def test_any_places_have_what_they_have_among_all(
    parts: WeightedParts, epoch: int, data: st.DataObject
) -> None:
    total = sum(parts.places)
    places = np.array(data.draw(st.lists(st.integers(0, total - 1))), np.int64)

    assert (
        parts.positions(places, epoch).tolist() == parts.positions(np.arange(total), epoch)[places].tolist()
    )


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        (0.5, "a dict with one number for each of a, b"),
        ({"a": 1}, "one number for each of a, b"),
        ({"a": 1, "b": 1, "c": 1}, "one number for each of a, b"),
        ({"a": 1, "b": 0}, "weight of b must be a number above 0, not 0"),
        ({"a": 1, "b": -1.0}, "weight of b"),
        ({"a": float("nan"), "b": 1}, "weight of a"),
        ({"a": float("inf"), "b": 1}, "weight of a"),
        ({"a": True, "b": 1}, "weight of a"),
        ({"a": "1", "b": 1}, "weight of a"),
        ({"a": 1e9, "b": 1}, "no place in an epoch for b, which has 20"),
    ],
)
def test_other_weights_are_refused(weights: object, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        WeightedParts.of(weights, ["a", "b"], [10, 20])
