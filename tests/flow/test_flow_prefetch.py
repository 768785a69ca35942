"""A prefetching thread: how far ahead it runs, in which order, and that it always ends."""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders import Flow
from shardprep.loaders.batches.passes import end
from shardprep.loaders.flow import prefetch
from shardprep.loaders.flow.passes import Function, PassContext
from shardprep.loaders.flow.prefetch import Prefetch
from shardprep.loaders.flow.sources import FromCallable
from support.flow_members import Items, SourceFailed, all_of
from support.scripts import Start, scripts
from support.waiting import until

TEST_TIMEOUT_S = 60  # seconds after which a test that hangs fails
PRELUDE = """
import os, sys, threading
from shardprep.loaders import Flow
from shardprep.loaders.flow import prefetch

prefetch.CLOSE_TIMEOUT_S = 0.2

def ones():
    while True:
        yield 1

reached = threading.Event()

def blocked():
    yield 1
    print("blocked", flush=True)
    reached.set()
    threading.Event().wait()
"""


def running() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "shardprep-prefetch"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with scripts(tmp_path, PRELUDE) as start:
        yield start


@pytest.mark.parametrize("items", [1, 2, 5])
def test_it_runs_so_many_items_ahead_and_no_further(items: int) -> None:
    drawn: list[int] = []

    def begin() -> Iterator[int]:
        for number in range(100):
            drawn.append(number)
            yield number

    ahead = iter(Flow.from_callable(begin).prefetch(items))
    for taken in (1, 2, 3):
        next(ahead)
        until(lambda taken=taken: len(drawn) == taken + items)  # type: ignore[misc]
        time.sleep(0.02)
        assert len(drawn) == taken + items
    end(ahead)
    assert len(drawn) == 3 + items


def test_nothing_runs_before_the_first_item_is_asked_for() -> None:
    source = Items()
    items = Prefetch(source, 2).run(PassContext())
    assert not running()
    del items
    assert not source.begun


def test_the_source_runs_in_a_thread_of_its_own() -> None:
    source = Items()
    assert all_of(Prefetch(source, 2)) == all_of(Items())
    assert threading.get_ident() not in source.threads
    assert len(source.threads) == 1
    assert not running()


@pytest.mark.parametrize("fails_at", [0, 1, 7, 19])
def test_an_error_comes_after_the_items_before_it(fails_at: int) -> None:
    source = Items(20, fails_at=fails_at)
    items = Prefetch(source, 3).run(PassContext())
    assert len(list(islice(items, fails_at))) == fails_at
    with pytest.raises(SourceFailed):
        next(items)
    assert list(items) == []
    assert source.begun == source.ended
    assert not running()


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), MemoryError()])
def test_whatever_is_raised_is_raised_here(error: BaseException) -> None:
    def begin() -> Iterator[int]:
        yield 1
        raise error

    items = iter(Flow.from_callable(begin).prefetch())
    assert next(items) == 1
    with pytest.raises(type(error)):
        next(items)


def test_an_error_of_an_item_that_was_not_asked_for_is_not_raised() -> None:
    items = Prefetch(Items(20, fails_at=2), 5).run(PassContext())
    next(items)
    end(items)


@pytest.mark.parametrize("ending", ["closed", "dropped", "dropped in a cycle", "exhausted"])
def test_however_a_pass_ends_its_thread_has_ended_and_its_source_is_closed(ending: str) -> None:
    source = Items(20 if ending == "exhausted" else None, can_pick=False)
    items = Prefetch(source, 2).run(PassContext())
    cycle: list[Any] = [items]
    next(items)
    if ending == "closed":
        end(items)
    elif ending == "exhausted":
        for _ in items:
            pass
    else:
        cycle.append(cycle if ending == "dropped in a cycle" else None)
        del items, cycle
        gc.collect()
    assert source.begun == source.ended == [0]
    assert not running()


def test_passes_that_are_left_anywhere_leave_nothing() -> None:
    rng = np.random.default_rng(0)
    source = Items()
    for number in range(200):
        items = Prefetch(source, int(rng.integers(1, 5))).run(PassContext(number))
        found = [number for _, number in islice(items, int(rng.integers(1, 22)))]
        assert found == list(range(len(found)))
        end(items)
        assert not running()
    assert sorted(source.begun) == sorted(source.ended) == list(range(200))


def test_a_source_that_does_not_come_back_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "CLOSE_TIMEOUT_S", 0.1)
    go_on, closed = threading.Event(), threading.Event()

    def begin() -> Iterator[int]:
        try:
            yield 1
            go_on.wait()
            yield 2
        finally:
            closed.set()

    items = Prefetch(FromCallable(Function(begin)), 2).run(PassContext())
    assert next(items) == 1
    end(items)
    assert running()
    go_on.set()
    assert closed.wait(TEST_TIMEOUT_S)
    until(lambda: not running())


def test_two_in_a_row_run_further_ahead() -> None:
    node = Prefetch(Prefetch(Items(), 2), 3)
    assert all_of(node) == all_of(Items())
    items = node.run(PassContext())
    next(items)
    assert len(running()) == 2
    end(items)
    assert not running()


@pytest.mark.parametrize("items", [0, -1, 1.5, True])
def test_what_is_no_number_of_items_is_refused(items: Any) -> None:
    with pytest.raises(UsageError, match="number of items to prefetch must be"):
        Flow.from_iterable([1]).prefetch(items)


@pytest.mark.slow
def test_a_program_may_end_in_the_middle_of_a_pass(start: Start) -> None:
    program = start("""
import cv2, numpy
image = numpy.zeros((300, 300, 3), numpy.uint8)
items = iter(Flow.from_callable(ones).map(lambda item: cv2.imencode(".jpg", image)[1]).prefetch(4))
print(len(next(items)) > 0)
""")
    assert program.communicate(timeout=TEST_TIMEOUT_S) == ("True\n", "")
    assert program.returncode == 0


@pytest.mark.slow
def test_also_while_its_source_is_blocked(start: Start) -> None:
    program = start("items = iter(Flow.from_callable(blocked).prefetch(2))\nnext(items)\nreached.wait()\n")
    assert program.communicate(timeout=TEST_TIMEOUT_S) == ("blocked\n", "")
    assert program.returncode == 0


@pytest.mark.torture
def test_a_program_that_waits_hears_ctrl_c(start: Start) -> None:
    program = start("for item in Flow.from_callable(blocked).prefetch(2): pass\n")
    assert program.stdout is not None
    assert program.stdout.readline() == "blocked\n"
    time.sleep(0.2)
    program.send_signal(signal.SIGINT)
    _, err = program.communicate(timeout=TEST_TIMEOUT_S)
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert program.returncode == -signal.SIGINT


@pytest.mark.slow
def test_a_forked_copy_hears_that_the_pass_is_not_its_own(start: Start) -> None:
    program = start("""
flow = Flow.from_iterable(range(1000)).prefetch(2)
items = iter(flow)
found = [next(items)]
if not os.fork():
    try:
        next(items)
    except Exception as error:
        print(type(error).__name__, len(list(flow)), flush=True)
    sys.exit()
print(os.waitstatus_to_exitcode(os.wait()[1]), [*found, *items] == list(range(1000)))
""")
    assert program.communicate(timeout=TEST_TIMEOUT_S) == ("UsageError 1000\n0 True\n", "")
