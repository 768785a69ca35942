"""A prefetching thread: how far ahead it runs, in which order, and that it always ends."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.scripts import Start, scripts

TEST_TIMEOUT_S = 60  # seconds after which a test that hangs fails
PRELUDE = """
import os, sys, threading
from shardprep.loaders import Flow
from shardprep.loaders.flow import thread_map

thread_map.PASS_END_TIMEOUT_S = 0.2

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


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with scripts(tmp_path, PRELUDE) as start:
        yield start


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
