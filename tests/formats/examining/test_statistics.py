"""Statistics of parts are those of the whole, and those of the index stay within their memory."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, strategies as st

from shardprep.formats.reports.pixels import CODES, Measures, PixelStatistics

images = st.lists(
    st.one_of(
        st.none(),
        st.builds(
            lambda brightness, contrast, sharpness, seed: Measures(
                brightness,
                contrast,
                sharpness,
                seed,
                np.random.default_rng(seed).integers(0, 256, (32, 32, 3), np.uint8),
            ),
            st.sampled_from([0.0, 3.0, 255.0]),
            st.floats(0, 127),
            st.floats(0, 70_000),
            st.integers(0, 1 << 40),
        ),
    ),
    max_size=40,
)


def of(images: list[tuple[int, Measures | None]]) -> PixelStatistics:
    """The statistics of numbered images, of which None are damaged."""
    found = PixelStatistics()
    for number, measures in images:
        if measures is None:
            found.add_damaged(number, f"reason {number}")
        else:
            found.add(number, measures)
            found.codes.append(np.array([(number, number, measures.hash, True)], CODES))
    return found


@given(images, st.integers(0, 99))
def test_merged_statistics_of_any_parts_in_any_order_are_those_of_the_whole(
    images: list[Measures | None], seed: int
) -> None:
    rng, numbered = random.Random(seed), list(enumerate(images))
    whole = of(numbered)
    rng.shuffle(numbered)
    merged = PixelStatistics()
    while numbered:
        cut = rng.randint(1, len(numbered))
        merged.merge(of(numbered[:cut]))
        numbered = numbered[cut:]

    assert merged.to_json() == whole.to_json()
    assert (merged.images, merged.damaged_records) == (whole.images, whole.damaged_records)
    assert (merged.extremes, merged.damaged) == (whole.extremes, whole.damaged)
    assert np.array_equal(merged.small_sum, whole.small_sum)
    assert np.array_equal(merged.all_codes, whole.all_codes)
