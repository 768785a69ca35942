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
from shardprep.formats.runtime.workers import START_TIMEOUT_S, Child, ChildLost, WorkerPool
from shardprep.loaders.engine.dispatcher import MIN_START_TIMEOUT_S, Starts
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


@pytest.mark.slow
def test_a_worker_that_is_stopped_before_it_reads_what_to_do_holds_up_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_at_every_start(tmp_path, monkeypatch)
    large = Writing(dict.fromkeys(range(100000), engine_workers.nothing))
    with (
        Engine(large, layout(4), workers=2, start_timeout=SHORT) as engine,
        pytest.raises(WorkerDied, match=IN_VAIN),
    ):
        next(engine.run([np.arange(4)]))


def test_an_engine_with_blocked_workers_closes() -> None:
    with Engine(Writing(at_opening=engine_workers.stop), layout(4), workers=2) as engine:
        pass

    assert engine.stats().restarts == 0


@pytest.mark.parametrize(
    ("deadline", "timeout", "limit"),
    [
        (None, None, START_TIMEOUT_S),
        (0.5, None, MIN_START_TIMEOUT_S),
        (600.0, None, 600.0),
        (600.0, 5.0, 5.0),
    ],
)
def test_a_start_may_take_as_long_as_a_row_and_a_good_deal_in_any_case(
    deadline: float | None, timeout: float | None, limit: float
) -> None:
    assert Starts(timeout=timeout, deadline=deadline).timeout == limit
    assert 30 <= MIN_START_TIMEOUT_S < START_TIMEOUT_S


def test_only_overdue_starts_of_one_worker_in_a_row_are_failures() -> None:
    starts = Starts(timeout=SHORT, deadline=None)
    for worker in (0, 1, 2):
        starts.failed(worker, -9, overdue=True)
    starts.succeeded(0)
    starts.failed(0, -9, overdue=True)

    with pytest.raises(WorkerDied, match=IN_VAIN):
        starts.failed(1, -9, overdue=True)


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


def test_a_child_that_is_killed_while_it_starts_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_at_every_start(tmp_path, monkeypatch)
    with Child() as child:
        child.kill()
        with pytest.raises(ChildLost, match="signal 9"):
            child.call(divmod, 7, 2)


def test_a_start_does_not_count_as_time_of_a_call() -> None:
    with Child() as child:
        assert child.call_within(SHORT, os.getppid) == os.getpid()


@pytest.mark.slow
def test_a_pool_that_cannot_start_a_process_says_so_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_at_every_start(tmp_path, monkeypatch)
    with WorkerPool(1, start_timeout=SHORT) as pool, pytest.raises(WorkerDied, match=IN_VAIN):
        pool.submit(abs, 1).result()


@pytest.mark.parametrize("start", [opened, called])
def test_a_system_that_allows_no_further_process_is_an_error_that_says_what_to_do(
    start: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr("multiprocessing.util.spawnv_passfds", refuse)  # root may start as many as it likes

    with pytest.raises(OperationError, match=r"no further process.*ulimit -u.*fewer workers"):
        start()
