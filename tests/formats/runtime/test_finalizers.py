"""Finalizers and handlers of forks, exits and signals wait for no lock of this package.

A garbage collection runs in any thread, at any point: a lock that it waits for may be held there, or by a
thread that waits for this one.
"""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shardprep.formats.errors import OutputBusy
from shardprep.formats.runtime import processes
from shardprep.formats.runtime.owners import cached_property
from shardprep.formats.runtime.processes import Child, WorkerPool, call_isolated
from shardprep.formats.runtime.work_folder import WorkFolder
from support.repository import SUPPORT
from support.scripts import scripts

TEST_TIMEOUT_S = 120  # seconds after which a test that hangs fails

PRELUDE = """
import faulthandler, gc, os, signal, sys, threading, time
from itertools import islice
from pathlib import Path
import numpy as np
faulthandler.dump_traceback_later(100, exit=True)

KINDS = type(threading.Lock()), type(threading.RLock()), threading.Condition

def locks():
    found = [
        value
        for each in gc.get_objects()
        if str(getattr(type(each), "__module__", "")).startswith("shardprep")
        for value in getattr(each, "__dict__", {}).values()
        if isinstance(value, KINDS)
    ]
    for name, module in list(sys.modules.items()):
        if name.startswith("shardprep"):
            found += [value for value in vars(module).values() if isinstance(value, KINDS)]
    return found

def collect_while_all_locks_are_held_elsewhere():
    held, over = threading.Event(), threading.Event()
    found = locks()
    def hold():
        for lock in found:
            lock.acquire(timeout=5)
        held.set()
        over.wait()
        for lock in found:
            try:
                lock.release()
            except RuntimeError:
                pass
    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    gc.collect()
    over.set()
    thread.join()
    return len(found)
"""


MADE = {
    "loader": """
from shardprep.loaders import Loader, LocalShuffle
loader = Loader(os.environ["SHARDS"], batch_size=4, shuffle=LocalShuffle(9), workers=1)
cycle = [loader, iter(loader)]
held = next(cycle[1])
""",
    "dataset": """
from shardprep.formats import open_dataset
dataset = open_dataset(os.environ["SHARDS"])
cycle = [dataset, dataset.shard(0), dataset[0]]
""",
    "flow in threads": """
from shardprep.loaders import Flow
passes = iter(Flow.from_iterable(range(100)).map(abs, threads=2).prefetch(2))
cycle = [passes, next(passes)]
""",
    "flow in processes": """
from shardprep.loaders import Flow
flow = Flow.from_iterable(range(100)).cache().map(abs, processes=1)
passes = iter(flow)
cycle = [flow, passes, next(passes)]
""",
    "flow with calls that wait for a lock": """
from shardprep.loaders import Flow
wanted = threading.Lock()
wanted.acquire()
def wait(item):
    if item:
        wanted.acquire()
    return item
passes = iter(Flow.from_iterable(range(100)).map(wait, threads=2))
cycle = [passes, next(passes)]
""",
    "receivers": """
from shardprep.loaders.machines.frames import FrameReceiver
from shardprep.loaders.remote import RemoteSource
cycle = [RemoteSource("tcp://127.0.0.1:*"), FrameReceiver("tcp://127.0.0.1:*")]
""",
}


@pytest.mark.torture
@pytest.mark.parametrize("made", MADE.values(), ids=MADE.keys())
def test_what_is_dropped_is_collected_while_another_thread_holds_all_locks(
    made: str, hdf5_shards: Path, tmp_path: Path
) -> None:
    script = f"""
{made}
gc.disable()
cycle.append(cycle)
kept = [name for name in ("loader", "dataset", "flow", "passes", "held") if name in globals()]
for name in kept:
    del globals()[name]
del cycle
collect_while_all_locks_are_held_elsewhere()
print("collected", flush=True)
os._exit(0)
"""
    with scripts(tmp_path, PRELUDE, SHARDS=str(hdf5_shards), PYTHONPATH=SUPPORT) as start:
        process = start(script)
        said, errors = process.communicate(timeout=TEST_TIMEOUT_S)

    assert (said, process.returncode) == ("collected\n", 0), errors


def test_at_the_end_of_the_program_owners_end_in_the_main_thread_and_quietly() -> None:
    program = (
        "import json, os, sys, threading\n"
        "from shardprep.formats.runtime.owners import Finalizer, Descriptor\n"
        "class Owner(Descriptor): __del__ = Descriptor.close\n"
        "owner, other = (kind(os.open('/', 0)) for kind in (Owner, Descriptor))\n"
        "sys.kept, json.kept = [json, sys.modules[Descriptor.__module__]], [owner, other]\n"
        "end = Finalizer(owner, lambda: print(threading.current_thread() is threading.main_thread()))\n"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)

    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


@pytest.mark.slow
def test_a_forked_copy_that_closes_an_owner_leaves_the_original_alone(tmp_path: Path) -> None:
    with Child() as made, WorkerPool(1) as workers, WorkFolder(tmp_path / "output") as place:
        workers.submit(abs, 1).result()

        if not (pid := os.fork()):
            try:
                assert [lock.fileno() for lock in place._locks] == [-1]  # a lasting copy holds no lock
                made.kill()
                made.__exit__()
                place.__exit__(None, None, None)
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0
        assert made.call(None, divmod, 7, 2) == (3, 1)
        assert workers.submit(divmod, 7, 2).result() == (3, 1)
        with pytest.raises(OutputBusy):
            WorkFolder(tmp_path / "output").__enter__()
        place.remove()


def test_a_copy_forked_while_a_property_is_computed_computes_it_itself() -> None:
    begun, go_on = threading.Event(), threading.Event()

    class Slow:
        @cached_property
        def value(self) -> int:
            begun.set()
            return 3 if go_on.wait(timeout=60) else 0

    slow = Slow()
    thread = threading.Thread(target=lambda: slow.value)
    thread.start()
    begun.wait()

    if not (pid := os.fork()):
        try:
            go_on.set()
            signal.alarm(10)
            os._exit(slow.value)
        finally:
            os._exit(1)
    go_on.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3


@pytest.mark.slow
def test_a_copy_forked_while_another_thread_starts_a_process_starts_its_own() -> None:
    with processes._start_lock:
        if not (pid := os.fork()):
            try:
                signal.alarm(60)
                os._exit(call_isolated(60, abs, -3))
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
