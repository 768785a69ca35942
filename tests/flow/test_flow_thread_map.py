"""Maps in threads: what runs at once, how far ahead, and that no thread outlives its pass."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from types import FrameType

import pytest

from shardprep.loaders.flow.flow import Flow
from support.scripts import scripts

TEST_TIMEOUT_S = 20.0  # a limit for a busy machine, far above what the tests need


def own_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("shardprep-map")]


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
