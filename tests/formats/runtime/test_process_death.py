"""A death of a process is noticed at once; one that blocks at its start is replaced; no room is an error."""

import errno
import itertools
import operator
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import spawn
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from shardprep.formats.errors import OperationError, OutputBusy, WorkerDied
from shardprep.formats.runtime import processes as pool
from shardprep.formats.runtime.processes import Child, ChildLost, SpawnedProcess, call_isolated, usable_cpus
from shardprep.formats.runtime.work_folder import refuse_busy
from shardprep.loaders.engine import dispatcher
from shardprep.loaders.engine.engine import Engine
from support import engine_workers
from support.engine_workers import Once, Writing, layout
from support.forking_work import (
    ForkThen,
    kill_those_of,
    say_three_things_and_leave,
    stopped_within_its_answer,
)
from support.process_table import text_of
from support.repository import SUPPORT
from support.sampling import torture_except
from support.scripts import Start, outcome, scripts, session_of
from support.source_builders import write
from support.waiting import until

TEST_TIMEOUT_S = 240  # seconds after which a test that hangs fails

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")


@pytest.fixture
def forked(tmp_path: Path) -> Iterator[Path]:
    """A folder with the numbers of the forked processes, which are killed after the test."""
    folder = tmp_path / "forked"
    folder.mkdir()
    yield folder
    kill_those_of(folder)
    until(lambda: not any(is_running(int(path.name)) for path in folder.iterdir() if path.name.isdecimal()))


@pytest.fixture(params=torture_except(["pidfd", "thread"], "pidfd"))
def _watched_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With pidfd, and as in Python built for an old C library."""
    if request.param == "thread":
        monkeypatch.delattr(os, "pidfd_open")


def is_running(pid: int) -> bool:
    """Whether the process exists, and is not a zombie."""
    return text_of(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()[:1] not in ([], ["Z"], ["X"])


@pytest.mark.slow
@pytest.mark.usefixtures("_watched_by")
@pytest.mark.parametrize(
    "end",
    torture_except([engine_workers.kill, engine_workers.crash, engine_workers.leave], engine_workers.kill),
)
@pytest.mark.parametrize("deadline", torture_except([None, 30.0], None))
def test_a_worker_that_forked_and_died_is_replaced_while_what_it_forked_lives(
    end: engine_workers.Action, deadline: float | None, forked: Path
) -> None:
    work = Writing({17: Once(forked / "once", ForkThen(forked, end))})
    with Engine(work, layout(10), workers=2, deadline=deadline) as engine:
        for number, batch in enumerate(engine.run([np.arange(n, n + 10) for n in range(0, 100, 10)])):
            assert batch.number == number
            assert (batch.arrays["number"] == batch.items).all()
            del batch

        assert engine.stats().restarts == 1
        assert all(is_running(int(path.name)) for path in forked.iterdir() if path.name.isdecimal())


@pytest.mark.slow
@pytest.mark.usefixtures("_watched_by")
def test_messages_sent_before_a_process_died_are_received(forked: Path) -> None:
    process = SpawnedProcess(say_three_things_and_leave, folder=forked)
    until(process.has_exited)

    assert list(process.channel.messages()) == [b"one", b"two", b"three" * 10_000]
    assert not process.channel.ended
    assert process.end(0) == 3
    assert process.end(0) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("_watched_by")
def test_a_call_that_stops_within_its_answer_takes_no_longer_than_it_may() -> None:
    with Child() as child, pytest.raises(ChildLost, match="no answer within 1 seconds"):
        child.call(1, stopped_within_its_answer, 0)


@pytest.mark.slow
@pytest.mark.usefixtures("_watched_by")
def test_an_exit_code_that_the_program_itself_took_is_not_waited_for() -> None:
    with Child() as child:
        child.call(None, abs, 1)
        os.kill(child._process.pid, signal.SIGKILL)
        os.waitpid(child._process.pid, 0)

        with pytest.raises(ChildLost, match="the program itself"):
            child.call(None, abs, 1)


PRELUDE = """
import os, time
from pathlib import Path
import numpy as np
from support.process_table import text_of
from support.engine_workers import Writing, layout
from shardprep.loaders.engine.engine import Engine

def fork_one_that_lives():
    if not os.fork():
        for descriptor in (0, 1, 2):
            os.close(descriptor)
        time.sleep(3600)

def children():
    listed = " ".join(text_of(path) for path in Path("/proc/self/task").glob("*/children")).split()
    return [int(pid) for pid in listed if "spawn_main" in text_of(Path(f"/proc/{pid}/cmdline"))]
"""


OLD_LIBRARY = "import os, socket\ndel os.pidfd_open, os.memfd_create\nsocket.setdefaulttimeout(0.01)\n"
USE = """
import sys
from shardprep import Loader
from shardprep.formats import PlanOptions, convert, verify

if __name__ == "__main__":
    source, output, crop_ready = sys.argv[1:]
    convert(source, output, plan_options=PlanOptions(crop_ready=crop_ready == "True"), workers=2, progress=False)
    with Loader(output + "/train", batch_size=8, workers=2, drop_last=False) as loader:
        print(sum(len(labels) for _, labels in loader) == len(loader.dataset))
    verify(output + "/train", level="decode", workers=1).raise_for_findings()
"""


@pytest.mark.slow
def test_python_for_an_old_c_library_as_by_uv_and_conda_converts_and_loads_also_with_a_socket_timeout(
    archives: Path, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(OLD_LIBRARY)
    (tmp_path / "use.py").write_text(USE)
    crop_ready = shutil.which("jpegtran") is not None
    command = [sys.executable, tmp_path / "use.py", archives, tmp_path / "output", str(crop_ready)]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TEST_TIMEOUT_S)
    assert (done.stdout, done.stderr) == ("True\n", "")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with scripts(tmp_path, PRELUDE, PYTHONPATH=SUPPORT) as start_script:
        yield start_script


@pytest.mark.torture
def test_a_killed_conversion_ends_and_frees_its_output_while_a_process_lives_that_its_program_forked(
    start: Start, archives: Path, tmp_path: Path
) -> None:
    output = tmp_path / "output"
    process = start(f"""
from shardprep.formats import convert
from shardprep.formats.runtime.progress import NoProgress
class Forking(NoProgress):
    def at(self, records, size):
        if children() and not hasattr(self, "forked"):
            self.forked = True
            fork_one_that_lives()
            print("now", flush=True)
            time.sleep(3600)
convert({str(archives)!r}, {str(output)!r}, split="train", workers=2, progress=Forking())
""")
    assert process.stdout is not None
    assert process.stdout.readline() == "now\n"
    with pytest.raises(OutputBusy):
        refuse_busy(output)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(TEST_TIMEOUT_S)

    # multiprocessing's tracker lives as long as any process that was forked
    name, proc = "resource_tracker", Path("/proc")
    until(lambda: [name in text_of(proc / f"{n}/cmdline") for n in session_of(process.pid)].count(False) == 1)
    refuse_busy(output)


@pytest.mark.torture
def test_a_main_script_without_a_guard_is_an_error_that_says_what_to_do(start: Start) -> None:
    script = """
import sys
sys.modules["cloudpickle"] = None  # with it, what the main script defines is sent by value

class Mine(Writing):
    pass

next(Engine(Mine(), layout(10), workers=1).run([np.arange(10)]))
"""
    code, said = outcome(start(script))

    assert code == 1
    assert "a worker process imports the main script" in said
    assert said.rstrip().endswith('under `if __name__ == "__main__":`')


def opened(block: engine_workers.Action | None = None) -> None:
    with Engine(Writing(at_opening=block), layout(4), workers=1) as engine:
        next(engine.run([np.arange(4)]))


def called() -> None:
    with Child() as child:
        assert child.call(None, divmod, 7, 2) == (3, 1)


STOPPING = """import os, signal, sys
if 'spawn_main' in ' '.join(sys.orig_argv): os.kill(os.getpid(), signal.SIGSTOP)
"""  # in each new Python process, at its start
BLOCKS = [engine_workers.sleep_for_ever, engine_workers.stop]


@pytest.mark.torture
@pytest.mark.parametrize("block", BLOCKS)
def test_a_worker_that_blocks_at_its_start_is_started_again(
    block: engine_workers.Action, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = time.monotonic()
    opened()
    monkeypatch.setattr(dispatcher, "START_TIMEOUT_S", 3 + 4 * (time.monotonic() - began))
    with Engine(Writing(at_opening=Once(tmp_path / "once", block)), layout(4), workers=1) as engine:
        assert [batch.number for batch in engine.run([np.arange(4)] * 20)] == list(range(20))
        assert engine.stats().restarts == 1
    assert (tmp_path / "once").exists()


@pytest.mark.slow
@pytest.mark.parametrize("block", [*BLOCKS, None])
def test_a_worker_or_child_that_blocks_at_each_start_is_an_error(
    block: engine_workers.Action | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (dispatcher, pool):
        monkeypatch.setattr(module, "START_TIMEOUT_S", 0.3)  # shorter than any start
    if block is None:
        (tmp_path / "sitecustomize.py").write_text(STOPPING)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(WorkerDied, match=r"not ready within 0\.3 s, and was killed.*import.*SIGSTOP"):
        called() if block is None else opened(block)


@pytest.mark.parametrize("start", [opened, called])
def test_a_system_that_allows_no_further_process_or_a_deleted_folder_is_an_error_that_says_what_to_do(
    start: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse = Mock(side_effect=BlockingIOError(errno.EAGAIN, "as for a user with too many processes"))
    monkeypatch.setattr("multiprocessing.util.spawnv_passfds", refuse)  # root may start as many as it likes

    with pytest.raises(OperationError, match=r"no further process.*ulimit -u.*fewer workers"):
        start()
    monkeypatch.setattr(os, "getcwd", Mock(side_effect=FileNotFoundError))
    with pytest.raises(OperationError, match="the current folder was deleted"):
        start()


@pytest.mark.parametrize(("group", "cpus"), [("0::/pod", 2), ("3:cpu,cpuacct:/", 3), ("4:memory:/", 64)])
def test_the_usable_cpus_are_those_of_the_quota_of_a_container(
    group: str, cpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quotas = {"pod/cpu.max": "150000 100000", "cpu.max": "max 100000"}
    older = {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}
    for name, text in {"groups": group, **quotas, **older}.items():
        write(tmp_path / name, text.encode())
    monkeypatch.setattr(pool, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(pool, "GROUPS_FOLDER", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))

    assert usable_cpus() == cpus


def test_a_large_answer_comes_whole_though_processes_were_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "monotonic", itertools.count(0, 3600).__next__)  # an hour between looks
    monkeypatch.setattr(spawn, "get_start_method", lambda: "loky")  # as in a process of joblib
    monkeypatch.setitem(vars(pool.multiprocessing.current_process())["_config"], "authkey", memoryview(b"ab"))
    monkeypatch.delattr("__main__.__spec__")  # as in pdb
    monkeypatch.setattr("socket.socket", type("Replaced", (pool.socket.socket,), {}))  # as by PySocks
    assert call_isolated(6000, operator.mul, b"digest", 1 << 20) == b"digest" * (1 << 20)


@pytest.mark.slow
def test_an_exit_without_an_answer_is_reported_in_the_thread_that_called() -> None:
    main = sys.modules["__main__"]
    before = getattr(main, "__file__", None), main.__spec__
    given = spawn.get_preparation_data("").keys()
    with ThreadPoolExecutor(4) as threads:
        futures = [threads.submit(call_isolated, 60, os._exit, code) for code in (0, 1, 77, 78)]
        while not all(future.done() for future in futures):
            assert spawn.get_preparation_data("").keys() == given  # what processes of the user get
        answers = [str(future.exception()) for future in futures]

    assert answers == [f"the process that worked on it exited with {code}" for code in (0, 1, 77, 78)]
    assert (getattr(main, "__file__", None), main.__spec__) == before


def test_a_process_whose_call_failed_makes_no_other_where_it_must_be_clean() -> None:
    with pool.WorkerPool(1) as children:
        first, second = (children.call_within(None, bool, os.getpid) for _ in range(2))
        with pytest.raises(ZeroDivisionError):
            children.call_within(None, bool, operator.truediv, 1, 0)
        third = children.call_within(None, bool, os.getpid)

    assert first == second != third


@pytest.mark.slow
def test_the_process_ends_with_its_parent(tmp_path: Path) -> None:
    noted = tmp_path / "pid"
    code = f"""
from pathlib import Path
from support.forking_work import sleeps
from shardprep.formats.runtime.processes import call_isolated
call_isolated(60, sleeps, Path({str(noted)!r}))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", code], env=environment) as parent:
        until(noted.exists)
        parent.kill()

    child = int(noted.read_text())
    until(lambda: not is_running(child))
