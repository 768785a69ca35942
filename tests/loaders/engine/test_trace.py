"""Traces: the format that Perfetto reads, and that they contain all that a loader did."""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from shardprep.loaders import Loader
from shardprep.loaders.measuring.progress_bar import tracing
from support import loader_workers
from support.loader_workers import Once, Tagging

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
