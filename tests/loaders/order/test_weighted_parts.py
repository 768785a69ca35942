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


@given(weighted(), st.integers(0, 1 << 63))
def test_each_part_has_its_places_of_an_epoch_and_no_record_comes_twice_as_often(
    parts: WeightedParts, epoch: int
) -> None:
    found = parts.positions(np.arange(sum(parts.places)), epoch)

    counts = np.bincount(found, minlength=sum(parts.records))
    for own, places in zip(np.split(counts, np.cumsum(parts.records)[:-1]), parts.places, strict=True):
        assert own.sum() == places
        assert own.max() - own.min() <= 1


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
