"""A process that blocks before it is ready is killed and started again, once; then it is an error."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shardprep.formats.errors import OperationError, WorkerDied
from shardprep.formats.runtime.workers import Child
from shardprep.loaders.engine.engine import Engine
from support import engine_workers
from support.engine_workers import Once, Writing, layout
from support.sampling import torture_except

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
