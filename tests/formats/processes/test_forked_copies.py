"""A forked copy of a program works while another thread of the program is busy in the package."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.scripts import Start, scripts

PATIENCE = 60  # seconds after which a test that hangs fails

PRELUDE = """
import os, signal, sys, threading
from pathlib import Path
from shardprep.formats import open_dataset
from shardprep.formats.shards import read as shard_cache
from shardprep.formats.runtime import processes as process_start
from shardprep.formats.runtime.workers import Child

inside, go_on = threading.Event(), threading.Event()

def stop_within(module, name):
    original = getattr(module, name)
    def stopping(*args, **kwargs):
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            go_on.wait()
        return original(*args, **kwargs)
    setattr(module, name, stopping)

def fork_within(work, copy):
    thread = threading.Thread(target=work)
    thread.start()
    inside.wait()
    pid = os.fork()
    if not pid:
        signal.alarm(20)  # ends what hangs
        copy()
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    go_on.set()
    thread.join()
    sys.exit(code)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with scripts(tmp_path, PRELUDE) as start_script:
        yield start_script


@pytest.mark.torture
def test_a_process_is_started_in_a_copy_forked_while_a_thread_started_one(start: Start) -> None:
    script = """
def start():
    with Child() as child:
        assert child.call(abs, -1) == 1

def start_in_copy():
    assert Path(sys.modules["__main__"].__file__).is_file()
    start()

stop_within(process_start.SPAWN.Process, "start")
fork_within(start, start_in_copy)
"""
    process = start(script)
    assert process.wait(PATIENCE) == 0, process.communicate()
