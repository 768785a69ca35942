"""What a consumer received over time: every batch is counted once, in bounded memory."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from shardprep.loaders.engine import engine as module
from shardprep.loaders.engine.engine import FIRST_WIDTH_S, MOST_BINS, Course


@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.integers(1, 500), st.integers(0, 9)), min_size=1, max_size=60)
)
def test_every_batch_is_counted_once_in_bins_of_equal_width(batches: list[tuple[float, int, int]]) -> None:
    course, clock = Course(), [100.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "perf_counter", lambda: clock[0])
        for gap, rows, ready in batches:
            clock[0] += gap
            course.add(rows, ready=ready, waited=gap)
    points = course.points()

    assert len(points) <= MOST_BINS
    assert sum(point.batches for point in points) == len(batches)
    assert sum(point.rows for point in points) == sum(rows for _, rows, _ in batches)
    assert sum(point.ready * point.batches for point in points) == pytest.approx(
        sum(at for _, _, at in batches)
    )
    assert sum(point.waited for point in points) == pytest.approx(sum(gap for gap, _, _ in batches))
    (width,) = {point.seconds for point in points}
    assert (width / FIRST_WIDTH_S).is_integer()
    assert [point.began for point in points] == [place * width for place in range(len(points))]
    last = sum(gap for gap, _, _ in batches[1:])
    assert points[-1].began <= last * (1 + 1e-9) + 1e-6
