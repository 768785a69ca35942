"""A process that blocks at its start is started again, once; one that cannot start or ends is an error."""

from __future__ import annotations

import errno
import operator
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats import convert, verify
from shardprep.formats.errors import OperationError, WorkerDied
from shardprep.formats.runtime.workers import Child, ChildLost, isolated
from shardprep.loaders import Flow, Loader, LocalShuffle
from shardprep.loaders.engine.engine import Engine
from shardprep.loaders.remote import RemoteSource
from support import engine_workers
from support.engine_workers import Once, Writing, layout
from support.isolated_calls import killed_by
from support.sampling import torture_except
from support.waiting import until

NO_ROOM = 1 << 46  # bytes; a stack for which no thread finds addresses


@contextmanager
def no_room() -> Iterator[None]:
    """Make the system refuse every new thread of this process within the context."""
    before = threading.stack_size(NO_ROOM)
    try:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            threading.Thread(target=print).start()
        yield
    finally:
        threading.stack_size(before)


SHORT = 0.3  # seconds; shorter than the start of any process
IN_VAIN = r"not ready within 0\.3 s, twice in a row.*import.*SIGSTOP"


def seconds_of(start: Callable[[], object]) -> float:
    began = time.monotonic()
    start()
    return time.monotonic() - began


def opened() -> None:
    with Engine(Writing(), layout(4), workers=1) as engine:
        next(engine.run([np.arange(4)]))


def called() -> None:
    with Child() as child:
        child.call(abs, 1)


@pytest.mark.torture
@pytest.mark.parametrize("block", [engine_workers.sleep_for_ever, engine_workers.stop])
def test_a_worker_that_blocks_at_its_start_is_started_again(
    block: engine_workers.Action, tmp_path: Path
) -> None:
    enough = 3 + 4 * seconds_of(opened)
    work = Writing(at_opening=Once(tmp_path / "once", block))
    with Engine(work, layout(4), workers=1, start_timeout=enough) as engine:
        batches = [batch.number for batch in engine.run([np.arange(4)] * 20)]

        assert batches == list(range(20))
        assert engine.stats().restarts == 1


@pytest.mark.slow
@pytest.mark.parametrize("workers", torture_except([1, 2], 1))
@pytest.mark.parametrize("block", [engine_workers.sleep_for_ever, engine_workers.stop])
def test_a_worker_that_blocks_at_each_start_is_an_error(block: engine_workers.Action, workers: int) -> None:
    with (
        Engine(Writing(at_opening=block), layout(4), workers=workers, start_timeout=SHORT) as engine,
        pytest.raises(WorkerDied, match=IN_VAIN),
    ):
        next(engine.run([np.arange(4)]))


# Where Python itself does not begin


def stop_at_every_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each new Python process stop itself before it does anything."""
    stop_at_start(folder, monkeypatch, unless="")


def stop_at_first_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_at_start(folder, monkeypatch, unless=str(folder / "once"))


def stop_at_start(folder: Path, monkeypatch: pytest.MonkeyPatch, *, unless: str) -> None:
    (folder / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        f"if 'spawn_main' in ' '.join(sys.orig_argv) and not os.path.exists({unless!r}):\n"
        f"    if {unless!r}: open({unless!r}, 'x').close()\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(folder))


@pytest.mark.torture
def test_a_child_that_is_stopped_at_its_start_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enough = 3 + 4 * seconds_of(called)
    stop_at_first_start(tmp_path, monkeypatch)
    with Child(start_timeout=enough) as child:
        assert child.call(divmod, 7, 2) == (3, 1)
    assert (tmp_path / "once").exists()


@pytest.mark.slow
def test_a_child_that_is_stopped_at_each_start_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_at_every_start(tmp_path, monkeypatch)
    with Child(start_timeout=SHORT) as child, pytest.raises(WorkerDied, match=IN_VAIN):
        child.call(divmod, 7, 2)


@pytest.mark.parametrize("start", [opened, called])
def test_a_system_that_allows_no_further_process_is_an_error_that_says_what_to_do(
    start: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr("multiprocessing.util.spawnv_passfds", refuse)  # root may start as many as it likes

    with pytest.raises(OperationError, match=r"no further process.*ulimit -u.*fewer workers"):
        start()


SECONDS = 60.0


def test_a_large_answer_comes_back_whole() -> None:
    assert isolated(SECONDS, operator.mul, b"digest", 1 << 20) == b"digest" * (1 << 20)


@pytest.mark.slow
@pytest.mark.parametrize("code", torture_except([0, 1, 77], 1))
def test_an_exit_without_an_answer_is_reported(code: int) -> None:
    with pytest.raises(ChildLost, match=f"exited with {code}"):
        isolated(SECONDS, os._exit, code)


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


def loader(path: Path) -> None:
    Loader(path, batch_size=4, workers=1)


def loader_that_reads_ahead(path: Path) -> None:
    with Loader(path, batch_size=4, shuffle=LocalShuffle(9), workers=0) as made:
        next(iter(made))


def conversion(path: Path) -> None:
    convert(path.parent / "archives", path.parent / "no-room", split="val", workers=1)


def conversion_here(path: Path) -> None:
    convert(path.parent / "archives", path.parent / "no-room", split="val", workers=0)


def verification(path: Path) -> None:
    verify(path)


def threads(path: Path) -> None:
    with closing(iter(Flow.from_iterable(range(9)).map(abs, threads=2))) as items:  # type: ignore[type-var]
        next(items)


def processes(path: Path) -> None:
    with Flow.from_iterable(range(9)).map(abs, processes=1) as flow:
        next(iter(flow))


def remote(path: Path) -> None:
    RemoteSource("tcp://127.0.0.1:*")


@pytest.mark.parametrize(
    "start",
    [
        *(loader, loader_that_reads_ahead, conversion, conversion_here, verification),
        *(threads, processes, remote),
    ],
)  # fmt: skip
def test_no_room_for_a_thread_is_an_error_that_says_what_to_do(
    start: Callable[[Path], Any], lmdb_shards: Path
) -> None:
    with (
        no_room(),
        pytest.raises(OperationError, match=r"no room for another thread.*ulimit -u.*fewer"),
    ):
        start(lmdb_shards)
