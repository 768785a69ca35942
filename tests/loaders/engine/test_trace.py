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
from support.sampling import torture_except

Event = dict[str, Any]

KEYS = {
    "X": {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"},
    "C": {"name", "ph", "ts", "pid", "tid", "args"},
    "M": {"name", "ph", "pid", "tid", "args"},
}
CONSUMER = 0
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


@pytest.mark.parametrize("workers", torture_except([0, 1, 2], 0))
def test_a_trace_is_in_the_format_of_chrome(workers: int, events: Mapping[int, list[Event]]) -> None:
    for event in events[workers]:
        assert set(event) == KEYS[event["ph"]]
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0
    times = [event["ts"] for event in events[workers] if "ts" in event]
    assert times == sorted(times)
    names = {event["args"]["name"] for event in events[workers] if event["name"] == "thread_name"}
    assert names == {"consumer", *(f"worker {number}" for number in range(max(1, workers)))}


@pytest.mark.parametrize("workers", [0, 2])
def test_every_batch_appears_and_spans_nest(workers: int, events: Mapping[int, list[Event]]) -> None:
    waits = [event for event in spans(events[workers], "consumer") if event["name"] == "waiting"]
    received = Counter((event["args"]["run"], event["args"]["batch"]) for event in waits)
    runs = sorted({run for run, _ in received})
    assert len(runs) == 2
    assert received == {(run, batch): 1 for run in runs for batch in range(20)}
    assert rows_of(events[workers]) == {(run, batch): 10 for run in runs for batch in range(20)}
    assert_nested(events[workers])


def test_leases_are_made_of_what_the_work_times(events: Mapping[int, list[Event]]) -> None:
    stages = spans(events[2], "stage")
    assert {event["name"] for event in stages} == {"read", "decode", "augment", "transport"}
    whole = sum(event["dur"] for event in spans(events[2], "lease"))
    assert sum(event["dur"] for event in stages) == pytest.approx(whole, rel=1e-3)


def test_steps_are_between_batches_of_one_epoch(events: Mapping[int, list[Event]]) -> None:
    consumed = spans(events[2], "consumer")
    assert Counter(event["name"] for event in consumed) == {"waiting": 40, "hand-over": 40, "step": 38}
    assert all(event["tid"] == CONSUMER for event in consumed)


def test_batches_that_lie_ready_are_counted(events: Mapping[int, list[Event]]) -> None:
    counts = [event["args"]["batches"] for event in events[2] if event["ph"] == "C"]
    assert counts
    assert min(counts) >= 0
    assert max(counts) >= 1


@pytest.mark.torture
def test_rows_that_a_dead_worker_held_appear_once(lmdb_shards: Path, tmp_path: Path) -> None:
    action = Once(tmp_path / "died", loader_workers.die)
    events = traced(
        lmdb_shards, tmp_path / "trace.json", epochs=1, workers=2, transform=Tagging({"": action})
    )

    assert (tmp_path / "died").exists()
    assert set(rows_of(events).values()) == {10}
    assert_nested(events)


@pytest.mark.slow
def test_a_trace_may_begin_and_end_in_the_middle(lmdb_shards: Path, tmp_path: Path) -> None:
    with Loader(lmdb_shards, batch_size=10, workers=2) as loader:
        batches = iter(loader)
        next(batches)
        with tracing(loader) as trace:
            for _ in range(5):
                next(batches)
        for _ in batches:
            pass
        trace.save(tmp_path / "trace.json")

    assert [reception.batch for reception in trace.receptions] == [1, 2, 3, 4, 5]
    assert_nested(json.loads((tmp_path / "trace.json").read_text())["traceEvents"])


def test_a_second_trace_ends_the_first(lmdb_shards: Path) -> None:
    with Loader(lmdb_shards, batch_size=10, workers=0) as loader, tracing(loader) as first:
        with tracing(loader) as second:
            seen = sum(1 for _ in loader)
        with tracing(loader) as third:
            pass

    assert [len(trace.receptions) for trace in (first, second, third)] == [0, seen, 0]


def test_a_trace_keeps_the_last_of_what_it_saw(lmdb_shards: Path) -> None:
    with Loader(lmdb_shards, batch_size=10, workers=1) as loader, tracing(loader, keep=3) as trace:
        for _ in loader:
            pass

    assert [reception.batch for reception in trace.receptions] == [17, 18, 19]
    assert len(trace.leases) == 3
