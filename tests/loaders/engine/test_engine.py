"""An engine with real processes: each row once, in order, even if workers die; its course, and its traces."""

import gc
import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import warnings
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from shardprep.formats.errors import UsageError, WorkerDied
from shardprep.formats.runtime.processes import starting_process
from shardprep.loaders import Loader
from shardprep.loaders.engine import dispatcher, engine as module, messages
from shardprep.loaders.engine.dispatcher import SlowRecord
from shardprep.loaders.engine.engine import FIRST_WIDTH_S, MAX_BINS, Course, Engine
from shardprep.loaders.engine.messages import CpuClock, Items, WorkFailed
from shardprep.loaders.measuring.progress_bar import tracing
from support import engine_workers
from support.engine_workers import Once, Uneven, Writing, layout
from support.loader_workers import Tagging
from support.process_table import descriptors
from support.repository import SUPPORT
from support.sampling import torture_except
from support.scripts import line_of, scripts, session_of
from support.waiting import until


def plans_of(total: int, batch: int) -> list[Items]:
    return [np.arange(first, min(first + batch, total)) for first in range(0, total, batch)]


def check_all(engine: Engine, plans: Sequence[Items]) -> None:
    """Run through without keeping any batch."""
    numbers = []
    for batch, plan in zip(engine.run(plans), plans, strict=True):
        assert (batch.items == plan).all()
        assert (batch.arrays["number"] == plan).all()
        assert (batch.arrays["pixels"] == plan[:, None]).all()
        numbers.append(batch.number)
        del batch
    assert numbers == list(range(len(plans)))


SIZES = [(0, 5, 3), (1, 5, 3), (203, 10, 3), (400, 64, 32), (9, 1, 1)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "total", "batch", "chunk"),
    torture_except(
        [*((count, *sizes) for count in (0, 1, 2) for sizes in SIZES), (4, 203, 10, 3)],
        *((0, *sizes) for sizes in SIZES),
        (1, *SIZES[0]),
        (2, 203, 10, 3),
    ),
)
def test_batches_are_exact_and_in_order_for_any_number_of_workers(
    count: int, total: int, batch: int, chunk: int
) -> None:
    with Engine(Writing(), layout(batch), workers=count, chunk=chunk, slots=3) as engine:
        check_all(engine, plans_of(total, batch))


@pytest.mark.slow
@pytest.mark.parametrize(
    "end",
    torture_except(
        [getattr(engine_workers, name) for name in ("kill", "crash", "leave", "stop", "notify", "hang_up")],
        *(engine_workers.kill, engine_workers.notify, engine_workers.hang_up),
    ),
)
def test_a_worker_that_ends_or_stops_unlike_one_that_gets_sigusr1_is_replaced_and_rows_come_once(
    end: engine_workers.Action, tmp_path: Path
) -> None:
    work = Writing({17: Once(tmp_path / "once", end)})
    with Engine(work, layout(10), workers=2, deadline=5 if end is engine_workers.stop else None) as engine:
        check_all(engine, plans_of(100, 10))
        assert engine.stats().restarts == (end not in (engine_workers.notify, engine_workers.hang_up))


@pytest.mark.slow
def test_the_time_for_the_first_row_begins_when_its_worker_is_ready() -> None:
    with Engine(Uneven(0, pause_s=0.5), layout(4), workers=1, deadline=1) as engine:
        next(engine.run(plans_of(4, 4)))

        assert engine.stats().restarts == 0


@pytest.mark.slow
def test_a_row_that_takes_too_long_is_named_in_one_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(dispatcher, "SLOW_ROW_S", 1.0)
    monkeypatch.setattr(dispatcher, "POLL_INTERVAL_S", 0.02)
    go_on, stopped_s = tmp_path / "go on", [0.0]
    monkeypatch.setattr(dispatcher, "monotonic", lambda: time.monotonic() + stopped_s[0])
    work = Writing({5: engine_workers.doze, 25: partial(engine_workers.wait_for, go_on)})
    with Engine(work, layout(10), workers=2, describe=str, locate="record {}".format) as engine:
        run = engine.run(plans_of(50, 10))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert [next(run).number, next(run).number] == [0, 1]
            stopped_s[0] = 3600.0  # as if all processes had been stopped for an hour
            until(lambda: bool(caught))
            go_on.touch()
            assert [batch.number for batch in run] == [2, 3, 4]

    assert [one.category for one in caught] == [SlowRecord]
    assert re.search(r"spent \d+ s on record 25; ", str(caught[0].message))
    assert "deadline= is the time" in str(caught[0].message)


@pytest.mark.torture
def test_an_exception_does_not_wait_for_rows_that_take_for_ever() -> None:
    work = Writing({0: engine_workers.sleep_for_ever, 3: engine_workers.refuse})
    with Engine(work, layout(4), workers=2) as engine, pytest.raises(KeyError):
        next(engine.run(plans_of(40, 4)))


def test_an_exception_that_cannot_be_pickled_comes_as_text() -> None:
    with (
        Engine(Writing({3: engine_workers.refuse_strangely}), layout(4), workers=1) as engine,
        pytest.raises(WorkFailed, match=r"(?s)item 3.*in refuse_strangely.*Strange: strange 3"),
    ):
        next(engine.run(plans_of(4, 4)))


@pytest.mark.slow
@pytest.mark.parametrize("by", torture_except([-1, 1], -1))
@pytest.mark.parametrize("count", torture_except([0, 1], 0))
def test_a_fill_that_yields_too_few_or_too_many_outcomes_is_an_error(by: int, count: int) -> None:
    with (
        Engine(Uneven(by), layout(4), workers=count) as engine,
        pytest.raises(ValueError, match="argument 2 is"),
    ):
        next(engine.run(plans_of(4, 4)))


@pytest.mark.slow
def test_an_engine_whose_workers_die_at_their_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(Writing(), layout(4), workers=1):  # whose descriptors of multiprocessing stay
        pass
    gc.collect()
    before = descriptors()
    monkeypatch.setattr(dispatcher, "MAX_FAILED_STARTS", 2)

    engine = Engine(Writing(at_opening=engine_workers.kill), layout(4), workers=2)
    with pytest.raises(WorkerDied, match="before it was ready, by SIGKILL"):
        next(engine.run(plans_of(4, 4)))
    del engine

    until(lambda: (gc.collect(), descriptors())[1] == before)
    monkeypatch.setattr("multiprocessing.spawn._python_exe", b"/no/python")
    with pytest.raises(WorkerDied, match="/no/python c"), Engine(Writing(), layout(4), workers=1) as one:
        next(one.run(plans_of(4, 4)))


@pytest.mark.slow
def test_a_worker_that_is_killed_at_its_start_is_started_again(tmp_path: Path) -> None:
    work = Writing(at_opening=Once(tmp_path / "once", engine_workers.kill))
    with Engine(work, layout(4), workers=1) as engine:
        check_all(engine, plans_of(8, 4))
        assert engine.stats().restarts == 1


@pytest.mark.slow
def test_an_interruption_while_the_thread_starts_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(Writing(), layout(4), workers=1):  # whose descriptors of multiprocessing stay
        pass
    gc.collect()
    before, start = descriptors(), threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "shardprep-dispatcher":
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    for _ in range(3):
        with suppress(KeyboardInterrupt):
            Engine(Writing(), layout(4), workers=2)

    until(lambda: (gc.collect(), descriptors())[1] == before)
    assert not multiprocessing.active_children()


def test_a_start_does_not_wait_for_an_engine_that_it_collects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "WORKER_EXIT_TIMEOUT_S", 600.0)  # or it would take an hour
    engine: Any = Engine(Writing(), layout(4), workers=1)
    engine.itself = engine
    with starting_process():
        del engine
        gc.collect()
    until(lambda: not multiprocessing.active_children())


@pytest.mark.torture
def test_a_break_does_not_wait_for_what_was_leased_before_and_keeps_no_plan() -> None:
    sleepy = dict.fromkeys(range(10, 100), engine_workers.doze)
    with Engine(Writing(sleepy), layout(10), workers=1, chunk=10) as engine:
        for _ in range(3):
            plans = plans_of(100, 10)
            next(engine.run(plans))
        left = [weakref.ref(plan) for plan in plans]
        del plans
        until(lambda: all(plan() is None for plan in left))

        assert engine.stats().stages["write"] < 20 * 0.2  # two leases of ten rows, after each of three breaks


@pytest.mark.torture
def test_a_worker_still_answering_at_the_close_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "WORKER_EXIT_TIMEOUT_S", 20.0)
    with Engine(Writing({1: engine_workers.swell}), layout(1), workers=1) as engine:
        run = engine.run(plans_of(2, 1))
        next(run)
        until(lambda: engine._status_table.place(0)[0] == 2)
        began = time.monotonic()

    assert time.monotonic() - began < 10


@pytest.mark.torture
def test_workers_outlive_the_thread_that_started_them() -> None:
    made: list[Engine] = []
    thread = threading.Thread(target=lambda: made.append(Engine(Writing(), layout(10), workers=2)))
    thread.start()
    thread.join()

    with made.pop() as engine:
        check_all(engine, plans_of(100, 10))

        assert engine.stats().restarts == 0


def test_an_engine_whose_workers_cannot_start_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="cannot be sent to the workers"):
        Engine(Writing({0: threading.Lock()}), layout(4), workers=1)  # type: ignore[dict-item]
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    Engine(Writing(), layout(4), workers=1).close()  # as a task of Celery may
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setattr(sys, "argv", ["program", "--multiprocessing-fork", "pipe_handle=3"])
    with pytest.raises(UsageError, match="freeze_support"):
        Engine(Writing(), layout(4), workers=1)


def named_files(pid: int) -> Iterator[str]:
    """The files of a process that could be left behind: shared memory, sockets and other named files."""
    with suppress(FileNotFoundError, ProcessLookupError):
        yield from re.findall(r"(?m)\s(/dev/shm/.*|/tmp/.*\.sock.*)$", Path(f"/proc/{pid}/maps").read_text())
        for link in Path(f"/proc/{pid}/fd").iterdir():
            target = str(link.readlink())
            if target.startswith(("/dev/shm", "/tmp")) and not target.startswith(sys.prefix):
                yield target
        inodes = {str(link.readlink())[8:-1] for link in Path(f"/proc/{pid}/fd").iterdir()}
        for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[6] in inodes and len(fields) > 7:
                yield fields[7]


PRELUDE = """
import os, time
import numpy as np
from support.engine_workers import Writing, layout, sleep_for_ever
from shardprep.loaders.engine.engine import Engine
"""


@pytest.mark.torture
@pytest.mark.parametrize("moment", ["starting", "working"])
@pytest.mark.parametrize("forked", [False, True])
def test_a_killed_process_leaves_no_worker_and_no_file(moment: str, forked: bool, tmp_path: Path) -> None:
    body = f"""
engine = Engine(Writing({{9: sleep_for_ever}}), layout(1), workers=2)
run = engine.run([np.arange(1) + i for i in range(10)])
if {moment == "working"}:
    next(run)
if {forked} and not os.fork():
    time.sleep(1)
if os.getpid() == os.getsid(0):
    print("now", flush=True)
    time.sleep(3600)
"""
    with scripts(tmp_path, PRELUDE, PYTHONPATH=SUPPORT) as start:
        process = start(body)
        assert line_of(process) == "now"
        named = {name for pid in session_of(process.pid) for name in named_files(pid)}

        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=240)  # a hang

        until(lambda: session_of(process.pid) == [])
    assert named == set()


@pytest.mark.torture
def test_a_row_is_skipped_that_crashes_every_worker_but_not_one_that_is_killed_from_outside() -> None:
    crashes = {25: engine_workers.crash, 30: engine_workers.crash}
    for last, error in ((engine_workers.refuse, KeyError), (engine_workers.kill, WorkerDied)):
        with Engine(Writing(crashes | {40: last}), layout(10), workers=2, skip_crashes=True) as engine:
            run = engine.run(plans_of(100, 10))
            batches = [next(run) for _ in range(4)]
            with pytest.raises(error):
                next(run)

        said = "its workers crashed by SIGSEGV"
        assert [batch.skipped for batch in batches] == [{}, {}, {5: said}, {0: said}]
        for batch in batches:
            rows = [row for row in range(10) if row not in batch.skipped]
            assert batch.arrays["number"][rows].tolist() == batch.items[rows].tolist()


ROUNDING = 0.002  # microseconds; times are whole nanoseconds, as floats


def assert_nested(events: list[dict[str, Any]]) -> None:
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
    transform = Tagging({"": Once(tmp_path / "died", engine_workers.kill)})
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
    assert {count for (_, batch), count in rows.items() if batch < len(loader)} == {10}  # others are ahead
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

    assert len(points) <= MAX_BINS
    assert sum(point.batches for point in points) == len(batches)
    assert sum(point.rows for point in points) == sum(rows for _, rows, _ in batches)
    assert sum(point.ready * point.batches for point in points) == pytest.approx(
        sum(at for _, _, at in batches)
    )
    assert sum(point.waited for point in points) == pytest.approx(sum(gap for gap, _, _ in batches))
    (width,) = {point.seconds for point in points}
    assert (width / FIRST_WIDTH_S).is_integer()
    assert [point.began for point in points] == [place * width for place in range(len(points))]
    assert points[-1].began <= sum(gap for gap, _, _ in batches[1:]) * (1 + 1e-9) + 1e-6


def test_without_the_kernels_account_nothing_is_known_of_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "SCHEDSTAT", f"{__file__}/none")
    clock = CpuClock()
    before = clock.read()
    sum(range(200_000))
    computed, waited = clock.read() - before

    assert (computed > 0, waited) == (True, 0)
