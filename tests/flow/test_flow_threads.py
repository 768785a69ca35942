"""Threads of a pass: they hear of Ctrl-C, end with it, and are not those of a forked copy."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from shardprep.loaders.flow.flow import Flow
from support.scripts import Start, scripts

TEST_TIMEOUT_S = 60.0  # a limit for a busy machine, far above what the tests need


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
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("shardprep-map")]


PRELUDE = """
import os, sys, threading
from shardprep.loaders import Flow
from shardprep.loaders.flow import thread_map

thread_map.PASS_END_TIMEOUT_S = 0.2
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with scripts(tmp_path, PRELUDE) as start:
        yield start


@pytest.mark.torture
def test_a_program_that_waits_for_a_prefetched_item_hears_ctrl_c(start: Start) -> None:
    program = start("""
def blocked():
    yield 1
    print("blocked", flush=True)
    threading.Event().wait()

for item in Flow.from_callable(blocked).prefetch(2):
    pass
""")
    assert program.stdout is not None
    assert program.stdout.readline() == "blocked\n"
    time.sleep(0.2)
    program.send_signal(signal.SIGINT)
    _, err = program.communicate(timeout=TEST_TIMEOUT_S)
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert program.returncode == -signal.SIGINT


@pytest.mark.slow
@pytest.mark.parametrize("step", ["prefetch(2)", "map(abs, threads=2)"])
def test_a_forked_copy_hears_that_the_pass_is_not_its_own(start: Start, step: str) -> None:
    program = start(f"""
import warnings
warnings.simplefilter("ignore")  # newer Pythons warn of a fork beside threads
flow = Flow.from_iterable(range(1000)).{step}
items = iter(flow)
found = [next(items)]
if not os.fork():
    try:
        next(items)
    except Exception as error:
        print(type(error).__name__, "forked" in str(error), len(list(flow)), flush=True)
    sys.exit()
print(os.waitstatus_to_exitcode(os.wait()[1]), [*found, *items] == list(range(1000)))
""")
    assert program.communicate(timeout=TEST_TIMEOUT_S) == ("UsageError True 1000\n0 True\n", "")
