"""The banded search finds what comparing each with each finds."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from hypothesis import given, strategies as st

from shardprep.formats.reports.duplicates import (
    DISTANCE,
    EQUAL_BYTES,
    band_masks,
    duplicates,
    near_pairs,
    shared,
)
from shardprep.formats.reports.pixels import CODES

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


@given(st.integers(1, 20))
def test_the_bands_are_all_bits_each_once(bands: int) -> None:
    masks = [int(mask) for mask in band_masks(bands)]

    assert sum(masks) == (1 << 64) - 1
    assert len(masks) == bands


def codes(values: list[int], digests: list[int], first: int = 0) -> np.ndarray:
    rows = [
        (first + n, digest, value, True)
        for n, (value, digest) in enumerate(zip(values, digests, strict=True))
    ]
    return np.array(rows, CODES)


@given(hashes(12), st.data())
def test_links_join_the_images_that_are_alike_and_no_others(values: list[int], data: st.DataObject) -> None:
    chosen = [data.draw(st.integers(0, len(values) - 1)) for _ in values]  # equal bytes have an equal hash
    values = [values[n] for n in chosen]
    found = duplicates(codes(values, chosen)).links

    for first, second, distance in found.tolist():
        bits = (values[first] ^ values[second]).bit_count()
        assert (bits, chosen[first] == chosen[second]) == (max(distance, 0), distance == EQUAL_BYTES)
    assert joined(len(values), found) == joined(len(values), brute(values, DISTANCE))


def joined(count: int, pairs: object) -> list[int]:
    """For each image the first one that it is joined with, over any number of others."""
    roots = list(range(count))
    for pair in map(tuple, pairs):  # type: ignore[call-overload]
        low, high = sorted((roots[pair[0]], roots[pair[1]]))
        roots = [low if root == high else root for root in roots]
    return roots


@given(hashes(10), hashes(10))
def test_images_of_both_are_those_that_brute_force_finds(mine: list[int], theirs: list[int]) -> None:
    first = len(mine)
    found = shared(codes(mine, mine), codes(theirs, theirs, first)).links

    across = {(a, b) for a, b in brute([*mine, *theirs], DISTANCE) if a < first <= b}
    assert {(a, b) for a, b, _ in found.tolist()} <= across
    values = [*mine, *theirs]
    assert {values[a] for a, _, _ in found.tolist()} == {values[a] for a, _ in across}
    equal = {a for a, b in across if values[a] == values[b]}
    assert {a for a, _, d in found.tolist() if d == EQUAL_BYTES} == equal
