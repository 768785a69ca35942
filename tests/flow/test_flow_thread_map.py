"""Maps in threads: what runs at once, how far ahead, and that no thread outlives its pass."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from shardprep.formats.errors import UsageError
from shardprep.loaders.flow.flow import Flow
from shardprep.loaders.flow.thread_map import WINDOW
from support.scripts import scripts

TEST_TIMEOUT_S = 20.0  # a limit for a busy machine, far above what the tests need


def own_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("shardprep-map")]


class Endless:
    """Numbers without end; ``drawn`` counts them."""

    def __init__(self) -> None:
        self.drawn = 0
        self.ended = False

    def __call__(self) -> Iterator[int]:
        try:
            for number in count():
                self.drawn += 1
                yield number
        finally:
            self.ended = True


@settings(deadline=None, max_examples=30)
@given(items=st.integers(0, 200), threads=st.integers(1, 9), ordered=st.booleans())
def test_each_item_comes_once_and_in_order_unless_that_is_not_asked_for(
    items: int, threads: int, ordered: bool
) -> None:
    called: list[int] = []

    def noted(item: int) -> int:
        called.append(item)
        return -item

    found = list(Flow.from_iterable(range(items)).map(noted, threads=threads, ordered=ordered))

    assert sorted(called) == list(range(items))
    assert (found if ordered else sorted(found, reverse=True)) == [-item for item in range(items)]


def test_as_many_items_are_under_way_at_once_as_there_are_threads() -> None:
    together = threading.Barrier(4, timeout=TEST_TIMEOUT_S)

    found = list(Flow.from_iterable(range(40)).map(lambda item: (together.wait(), item)[1], threads=4))

    assert found == list(range(40))


def test_a_slow_item_holds_up_no_other_within_the_window() -> None:
    others_done = threading.Event()
    done: list[int] = []

    def function(item: int) -> int:
        if item == 0:
            assert others_done.wait(TEST_TIMEOUT_S)
        done.append(item)
        if len(done) == 2 * WINDOW - 1:
            others_done.set()
        return item

    assert list(islice(Flow.from_callable(Endless()).map(function, threads=2), 3)) == [0, 1, 2]
    assert done[2 * WINDOW - 1] == 0


def test_results_come_as_they_are_made_where_their_order_does_not_matter() -> None:
    released = threading.Event()
    flow = Flow.from_iterable(range(9)).map(
        lambda item: (item or released.wait(TEST_TIMEOUT_S), item)[1], threads=2, ordered=False
    )
    results = iter(flow)

    assert sorted(next(results) for _ in range(8)) == list(range(1, 9))
    released.set()
    assert list(results) == [0]
    assert not flow.can_pick


def test_no_more_is_drawn_ahead_than_the_window_whatever_is_slow() -> None:
    source, released = Endless(), threading.Event()
    results = iter(
        Flow.from_callable(source).map(lambda item: (released.wait(TEST_TIMEOUT_S), item)[1], threads=2)
    )
    threading.Timer(0.2, released.set).start()

    for number in range(200):
        assert next(results) == number
        assert source.drawn <= number + 1 + 2 * WINDOW


def test_a_result_that_is_there_is_not_kept_back_until_the_window_is_full() -> None:
    second_begun = threading.Event()

    def source() -> Iterator[int]:
        yield from (0, 1)
        assert second_begun.wait(TEST_TIMEOUT_S)  # so the only thread has finished the first
        yield 2
        pytest.fail("this was asked for before the first result was handed out")

    def function(item: int) -> int:
        if item == 1:
            second_begun.set()
        return item

    results = iter(Flow.from_callable(source).map(function, threads=1))
    assert next(results) == 0
    results.close()  # type: ignore[attr-defined]


@pytest.mark.slow
def test_an_early_end_begins_no_more_calls_and_waits_for_those_that_run() -> None:
    begun: list[int] = []
    ended: list[int] = []
    closing = threading.Event()

    def function(item: int) -> int:
        begun.append(item)
        if item:
            closing.wait(0.5)
        ended.append(item)
        return item

    source = Endless()
    results = iter(Flow.from_callable(source).map(function, threads=3))
    assert next(results) == 0
    results.close()  # type: ignore[attr-defined]

    assert sorted(begun) == sorted(ended)
    assert len(begun) <= 4
    assert source.ended
    assert not own_threads()


def test_a_pass_that_is_dropped_ends_as_one_that_is_closed() -> None:
    source = Endless()
    for number in Flow.from_callable(source).map(lambda item: item, threads=3):
        if number == 5:
            break

    assert source.ended
    assert not own_threads()


def test_an_exception_comes_when_its_items_turn_has_come() -> None:
    failed = threading.Event()

    def function(item: int) -> int:
        if item == 5:
            failed.set()
            raise KeyError(item)
        assert failed.wait(TEST_TIMEOUT_S)
        return item

    results = iter(Flow.from_iterable(range(99)).map(function, threads=6))

    assert [next(results) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(KeyError) as raised:
        next(results)
    assert "In item 5 of pass 0" in raised.value.__notes__[0]
    assert not own_threads()
    assert list(results) == []


def test_an_exception_of_the_source_waits_for_all_that_is_under_way() -> None:
    source_failed = threading.Event()

    def source() -> Iterator[int]:
        yield from range(5)
        source_failed.set()
        raise OSError("gone")

    flow = Flow.from_callable(source).map(
        lambda item: (source_failed.wait(TEST_TIMEOUT_S), item)[1], threads=2, ordered=False
    )
    results = iter(flow)

    assert sorted(next(results) for _ in range(5)) == [0, 1, 2, 3, 4]
    with pytest.raises(OSError, match="gone"):
        next(results)


def test_ctrl_c_is_heard_while_a_result_is_waited_for() -> None:
    heard = threading.Event()
    outcomes: list[bool] = []

    def interrupted(number: int, frame: FrameType | None) -> None:
        if not heard.is_set():
            heard.set()
            raise KeyboardInterrupt

    def function(item: int) -> int:
        """Send SIGINT until it is handled, because Python may miss a signal just before it begins to wait."""
        for _ in range(40):
            os.kill(os.getpid(), signal.SIGINT)
            if heard.wait(TEST_TIMEOUT_S / 40):
                break
        outcomes.append(heard.is_set())
        return item

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            next(iter(Flow.from_iterable([1]).map(function, threads=1)))
    finally:
        signal.signal(signal.SIGINT, before)
    assert outcomes == [True]
    assert not own_threads()


@pytest.mark.parametrize("threads", [-1, True, 1.0])
def test_a_number_of_threads_that_is_none_is_refused_at_once(threads: Any) -> None:
    with pytest.raises(UsageError, match="threads"):
        Flow.from_iterable([1]).map(abs, threads=threads)


PRELUDE = """
import os, sys, time
from shardprep.formats.errors import UsageError
from shardprep.loaders.flow.flow import Flow

def noted(item):
    os.write(1, b".")
    time.sleep(0.05)
    return item

results = iter(Flow.from_iterable(range(1000)).map(noted, threads=2))
next(results)
"""


def test_the_interpreter_exits_without_running_the_remaining_tasks(tmp_path: Path) -> None:
    with scripts(tmp_path, PRELUDE) as start:
        calls, errors = start("").communicate(timeout=TEST_TIMEOUT_S)

    assert errors == ""
    assert len(calls) < 10


@pytest.mark.slow
def test_a_pass_does_not_go_on_in_a_process_that_was_forked(tmp_path: Path) -> None:
    body = """
import warnings
warnings.simplefilter("ignore")  # newer Pythons warn of a fork beside threads
if os.fork() == 0:
    try:
        next(results)
    except UsageError as error:
        os.write(2, str(error).encode())
    os._exit(0)
os.wait()
"""
    with scripts(tmp_path, PRELUDE) as start:
        _, errors = start(body).communicate(timeout=TEST_TIMEOUT_S)

    assert "forked" in errors
