"""The banded search finds what comparing each with each finds."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from hypothesis import given, strategies as st

from shardprep.formats.reports.duplicates import (
    near_pairs,
)

flips = st.sets(st.integers(0, 63), max_size=7)


@st.composite
def hashes(draw: st.DrawFn, most: int = 24) -> list[int]:
    """Hashes of which many differ from another one in a few bits."""
    bases = draw(st.lists(st.integers(0, (1 << 64) - 1), min_size=1, max_size=3))
    made = draw(st.lists(st.tuples(st.sampled_from(bases), flips), max_size=most))
    return [base ^ sum(1 << bit for bit in bits) for base, bits in made]


def brute(values: list[int], distance: int) -> set[tuple[int, int]]:
    numbered = combinations(enumerate(values), 2)
    return {(i, j) for (i, a), (j, b) in numbered if (a ^ b).bit_count() <= distance}


@given(hashes(), st.integers(0, 6))
def test_the_banded_search_equals_brute_force_and_names_each_pair_once(
    values: list[int], distance: int
) -> None:
    found = [
        tuple(pair) for part in near_pairs(np.array(values, np.uint64), distance) for pair in part.tolist()
    ]

    assert len(found) == len(set(found))
    assert set(found) == brute(values, distance)
