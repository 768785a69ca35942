"""A call in a separate process: every end of that process is reported, and nothing is left."""

import operator
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shardprep.formats.runtime.workers import ChildLost, isolated
from support.isolated_calls import killed_by, sleeps
from support.sampling import torture_except
from support.waiting import until

SECONDS = 60.0


def test_a_large_answer_comes_back_whole() -> None:
    assert isolated(SECONDS, operator.mul, b"digest", 1 << 20) == b"digest" * (1 << 20)


@pytest.mark.slow
@pytest.mark.parametrize("code", torture_except([0, 1, 77], 1))
def test_an_exit_without_an_answer_is_reported(code: int) -> None:
    with pytest.raises(ChildLost, match=f"exited with {code}"):
        isolated(SECONDS, os._exit, code)


@pytest.mark.torture
def test_a_process_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    with pytest.raises(ChildLost, match="no answer within 3 seconds"):
        isolated(3, sleeps, tmp_path / "pid")

    assert not is_running(int((tmp_path / "pid").read_text()))


@pytest.mark.slow
def test_a_process_that_was_stopped_is_ended() -> None:
    with pytest.raises(ChildLost, match="no answer within 1 seconds"):
        isolated(1, killed_by, signal.SIGSTOP)


@pytest.mark.torture
def test_threads_do_not_take_each_others_processes() -> None:
    main = sys.modules["__main__"]
    before = getattr(main, "__file__", None), main.__spec__
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(isolated, SECONDS, os._exit, code) for code in range(12)]
        answers = [str(future.exception()) for future in futures]

    assert answers == [f"the process that worked on it exited with {code}" for code in range(12)]
    assert (getattr(main, "__file__", None), main.__spec__) == before


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_the_process_ends_with_its_parent(tmp_path: Path) -> None:
    noted = tmp_path / "pid"
    code = f"""
from pathlib import Path
from support.isolated_calls import sleeps
from shardprep.formats.runtime.workers import isolated
isolated(60, sleeps, Path({str(noted)!r}))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", code], env=environment) as parent:
        until(noted.exists)
        parent.kill()

    child = int(noted.read_text())
    until(lambda: not is_running(child))


def is_running(pid: int) -> bool:
    """Whether the process exists, and is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"
