"""Traces: the format that Perfetto reads, and that they contain all that a loader did."""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shardprep.loaders import Loader, TrainTransform
from shardprep.loaders.measuring.progress_bar import tracing
from support import loader_workers
from support.loader_workers import Once, Tagging

Event = dict[str, Any]

ROUNDING = 0.002  # microseconds; times are whole nanoseconds, as floats


def traced(path: Path, file: Path, *, epochs: int = 2, warm: bool = False, **options: Any) -> list[Event]:
    """The events of some epochs of ten batches or more; ``warm``: after each worker has begun."""
    with Loader(path, **({"batch_size": 10, "transform": TrainTransform(16)} | options)) as loader:
        while warm and not all(loader.stats().filling):
            deque(loader, maxlen=0)
        with tracing(loader) as trace:
            for _ in range(epochs):
                for _batch in loader:
                    time.sleep(0.002)  # meanwhile batches get ready
        trace.save(file)
    return list(json.loads(file.read_text())["traceEvents"])


@pytest.fixture(scope="module")
def events(lmdb_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[int, list[Event]]:
    """The events of two epochs, by the number of workers."""
    file = tmp_path_factory.mktemp("trace") / "trace.json"
    return {workers: traced(lmdb_shards, file, warm=workers > 1, workers=workers) for workers in (0, 1, 2)}


def spans(events: list[Event], kind: str) -> list[Event]:
    return [event for event in events if event["ph"] == "X" and event["cat"] == kind]


def rows_of(events: list[Event]) -> Counter[tuple[int, int]]:
    """How many rows of each batch of each run were leased."""
    rows: Counter[tuple[int, int]] = Counter()
    for event in spans(events, "lease"):
        rows[event["args"]["run"], event["args"]["batch"]] += event["args"]["rows"]
    return rows


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
    action = Once(tmp_path / "died", loader_workers.die)
    events = traced(
        lmdb_shards, tmp_path / "trace.json", epochs=1, workers=2, transform=Tagging({"": action})
    )

    assert (tmp_path / "died").exists()
    assert set(rows_of(events).values()) == {10}
    assert_nested(events)
