"""Statistics of parts are those of the whole, and those of the index stay within their memory."""

from __future__ import annotations

import random
import tracemalloc

import cv2
import numpy as np
import pytest
from hypothesis import given, strategies as st

from shardprep.formats.reports.observations import (
    MOST_POINTS,
    Histogram,
    index_statistics,
    odd_records,
    same_size,
)
from shardprep.formats.reports.pixels import CODES, Measures, PixelStatistics, measured
from shardprep.formats.shards.tables import index_dtype
from support.examined import picture
from support.image_files import encoded

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


@given(st.lists(st.tuples(*[st.integers(1, 3)] * 3), max_size=30), st.integers(0, 30))
def test_images_of_the_same_size_are_those_of_which_there_is_another(
    sizes: list[tuple[int, int, int]], cut: int
) -> None:
    rows = np.zeros(len(sizes), index_dtype(4))
    for name, column in zip(("length", "width", "height"), np.array(sizes).reshape(-1, 3).T, strict=True):
        rows[name] = column

    found = same_size([rows[:cut], rows[cut:]]).tolist()

    assert sorted(found) == [n for n, size in enumerate(sizes) if sizes.count(size) > 1]
    assert [sizes.count(sizes[n]) for n in found] == sorted(sizes.count(sizes[n]) for n in found)


@given(st.lists(st.integers(1, 1 << 31), min_size=1, max_size=50), st.booleans())
def test_a_histogram_counts_each_value(values: list[int], is_logarithmic: bool) -> None:
    made = Histogram.of(np.array(values), is_logarithmic=is_logarithmic)

    assert sum(made.counts) == len(values)
    assert (made.edges[0], made.edges[-1]) == (min(values), max(values))
    assert len(made.edges) == len(made.counts) + 1


@pytest.mark.parametrize("is_logarithmic", [False, True])
def test_outliers_are_in_the_last_bar_of_a_histogram_with_round_edges(is_logarithmic: bool) -> None:
    values = np.append(np.arange(300, 700), 9_000 if not is_logarithmic else 90_000_000)

    made = Histogram.of(values, is_logarithmic=is_logarithmic)

    assert sum(count > 0 for count in made.counts) >= 20
    assert made.edges[-1] == values[-1]
    assert made.counts[-1] <= 25
    assert all(edge % 20 == 0 for edge in made.edges[1:-1])


def large_index(records: int) -> np.ndarray:
    """An index such as that of ImageNet's train split."""
    rng = np.random.default_rng(0)
    rows = np.zeros(records, index_dtype(30))
    rows["label"] = rng.integers(0, 1000, records)
    rows["width"], rows["height"] = rng.integers(30, 2000, (2, records))
    rows["length"] = rng.gamma(2.0, 55_000, records) + 100
    rows["components"], rows["orientation"] = 3, 1
    return rows


def test_statistics_of_a_large_index_take_a_bounded_memory() -> None:
    index = large_index(1_280_000)
    tracemalloc.start()
    try:
        made = index_statistics(index, 1000, seed=0)
        odd = odd_records(index)
        same_size([index])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak < 100 * len(index)
    assert sum(made.width.counts) == sum(made.bytes.counts) == len(index)
    assert len(made.sides) == len(made.weights) == MOST_POINTS
    assert len(odd["tiny"]) == np.count_nonzero(np.minimum(index["width"], index["height"]) < 32)


@pytest.mark.parametrize("suffix", [".jpg", ".png"])
def test_contrast_and_sharpness_depend_on_the_picture_and_not_on_its_size(suffix: str) -> None:
    original, found = picture(0, 1400), []
    for side in (130, 145, 200, 255, 257, 290, 511, 513, 1023, 1025):
        size = round(side * original.shape[1] / original.shape[0]), side
        image = encoded(cv2.resize(original, size, interpolation=cv2.INTER_AREA), suffix)
        found.append(measured(image, *size))

    contrast, sharpness = [[getattr(one, name) for one in found] for name in ("contrast", "sharpness")]
    assert max(contrast) < 1.05 * min(contrast)
    assert max(sharpness) < 2 * min(sharpness)
