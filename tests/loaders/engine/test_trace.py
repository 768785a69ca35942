"""What a run of an engine leaves behind: the course of its batches, and traces that Perfetto reads."""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from shardprep.loaders import Loader
from shardprep.loaders.engine import engine as module, messages
from shardprep.loaders.engine.engine import FIRST_WIDTH_S, MOST_BINS, Course
from shardprep.loaders.engine.messages import CpuClock
from shardprep.loaders.measuring.progress_bar import tracing
from support import loader_workers
from support.engine_workers import Once
from support.loader_workers import Tagging

Event = dict[str, Any]

ROUNDING = 0.002  # microseconds; times are whole nanoseconds, as floats


def assert_nested(events: list[Event]) -> None:
    """Check that on every track a span ends before the next begins, or lies within the open one."""
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    for track in tracks.values():
        opened: list[float] = []
        for event in track:  # by time, the longer one first
            begin, end = event["ts"], event["ts"] + event["dur"]
            while opened and opened[-1] <= begin + ROUNDING:
                opened.pop()
            assert not opened or end <= opened[-1] + ROUNDING, event
            opened.append(end)


@pytest.mark.torture
def test_rows_that_a_dead_worker_held_appear_once(lmdb_shards: Path, tmp_path: Path) -> None:
    transform = Tagging({"": Once(tmp_path / "died", loader_workers.die)})
    with Loader(lmdb_shards, batch_size=10, transform=transform, workers=2) as loader:
        with tracing(loader) as trace:
            for _batch in loader:
                time.sleep(0.002)  # meanwhile batches get ready
        trace.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rows: Counter[tuple[int, int]] = Counter()
    for event in events:
        if event["ph"] == "X" and event["cat"] == "lease":
            rows[event["args"]["run"], event["args"]["batch"]] += event["args"]["rows"]

    assert (tmp_path / "died").exists()
    assert set(rows.values()) == {10}
    assert_nested(events)


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


def test_without_the_kernels_account_nothing_is_known_of_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "SCHEDSTAT", "/nowhere")
    clock = CpuClock()
    before = clock.read()
    sum(range(200_000))
    computed, waited = clock.read() - before

    assert (computed > 0, waited) == (True, 0)
