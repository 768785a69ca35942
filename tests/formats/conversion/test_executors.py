"""Conversion on an executor that the caller gave: other processes, other folders, other machines."""

import multiprocessing
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardprep.formats import BadImage, PlanOptions, SourceOptions, convert, export, verify
from shardprep.formats.runtime import jobs
from shardprep.formats.runtime.jobs import ExecutorFailed, OtherMachine, RayExecutor
from support.column_sources import write_pictures
from support.datasets import converted, tree, unpack
from support.engines import Engine, moved
from support.waiting import until

OPTIONS = PlanOptions(shard_size=60_000)


def on(executor: Executor, source: object, output: object, **options: Any) -> None:
    convert(source, output, split="train", plan_options=OPTIONS, executor=executor, **options)  # type: ignore[arg-type]


def pool(**options: Any) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn"), **options)


@pytest.mark.torture
def test_relative_paths_are_those_of_the_caller_whatever_the_workers_folder(
    archives: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "archives").symlink_to(archives)
    write_pictures(tmp_path / "photos", ["a.png", "b.png"])
    (tmp_path / "list.txt").write_text("a.png cat\nb.png dog\n")
    monkeypatch.chdir(tmp_path)
    with pool(initializer=os.chdir, initargs=("/",)) as processes:
        on(processes, "archives", "out")
        on(processes, "list.txt", "listed", source_options=SourceOptions(root="photos"))
        export("out", "exported", to="folders", executor=processes)

    converted(archives, tmp_path / "whole")
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
    assert verify("listed").findings == []
    assert len([path for path in Path("exported").rglob("n*/*") if path.is_file()]) == 24


@pytest.mark.slow
def test_a_killed_worker_of_a_pool_is_an_error_that_says_so_and_the_next_call_finishes(
    archives: Path, tmp_path: Path
) -> None:
    with pool() as processes:
        processes.submit(int).result()
        threading.Thread(target=_kill_one_of, args=(processes, tmp_path / "out")).start()
        with pytest.raises(ExecutorFailed, match=r"shard-\d+\.lmdb: .*BrokenProcessPool: .+") as failed:
            on(processes, archives, tmp_path / "out")
    assert isinstance(failed.value.__cause__, BrokenProcessPool)
    assert failed.value.exit_code == 3

    with pool() as processes:
        on(processes, archives, tmp_path / "out")

    converted(archives, tmp_path / "whole")
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def _kill_one_of(processes: ProcessPoolExecutor, output: Path) -> None:
    until(lambda: [*output.glob("shard-*")])
    os.kill(next(iter(processes._processes)), signal.SIGKILL)


class KilledWorker(Exception):
    """An error of an engine."""


def test_what_an_engine_raises_is_an_error_with_a_text(archives: Path, tmp_path: Path) -> None:
    lost = Engine(lambda future, call: future.set_exception(KilledWorker("three times")))
    with pytest.raises(ExecutorFailed, match="KilledWorker: three times"):
        on(lost, archives, tmp_path / "out")
    with pytest.raises(ExecutorFailed, match=r"\(CancelledError\)") as failed:
        on(Engine(lambda future, call: future.cancel() and None), archives, tmp_path / "out")
    assert isinstance(failed.value.__cause__, CancelledError)
    shut = ThreadPoolExecutor(1)
    shut.shutdown()
    with pytest.raises(ExecutorFailed, match="RuntimeError: cannot schedule"):
        on(shut, archives, tmp_path / "out")


def test_what_a_job_raises_is_raised_as_it_is(
    archives: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object, **options: object) -> None:
        raise raised

    monkeypatch.setattr("shardprep.formats.conversion.shard._write_shard", fail)
    with ThreadPoolExecutor(1) as threads:
        for raised in (BadImage("is none"), OSError(5, "Input/output error"), ZeroDivisionError("a mistake")):
            with pytest.raises(type(raised)) as found:
                on(threads, archives, tmp_path / "out")
            assert found.value is raised
    assert "in fail" in raised.__notes__[0]


@pytest.mark.parametrize("layout", ["tars", "tree"])
def test_a_machine_that_sees_another_source_or_none_is_refused_by_its_name(
    archives: Path, tmp_path: Path, layout: str
) -> None:
    source, other, mount, aside = (tmp_path / name for name in ("source", "other", "mount", "aside"))
    source.symlink_to(mount)
    mount.mkdir()
    for folder in (mount, other):
        if layout == "tars":
            shutil.copytree(archives, folder, dirs_exist_ok=True, copy_function=shutil.copyfile)
        else:
            unpack(archives, folder)
    for image in other.rglob("*.JPEG"):
        os.utime(image, (1, 1))

    for engine in (moved((mount, aside), (other, mount)), moved((mount, aside))):
        with pytest.raises(OtherMachine, match=f"machine {socket.gethostname()} does not see the source"):
            on(engine, source, tmp_path / "out")
        assert not [*(tmp_path / "out").glob("shard-*")]


def test_a_machine_that_does_not_see_the_output_is_refused(archives: Path, tmp_path: Path) -> None:
    with pytest.raises(OtherMachine, match="does not see the output"):
        on(moved((tmp_path / "out", tmp_path / "aside")), archives, tmp_path / "out")


@pytest.mark.parametrize("container", ["lmdb", "hdf5"])
def test_two_attempts_at_one_shard_at_the_same_time_do_no_harm(
    archives: Path, tmp_path: Path, container: str
) -> None:
    converted(archives, tmp_path / "whole", container=container)

    with ThreadPoolExecutor(3) as threads:

        def thrice(future: Future[Any], call: Callable[[], Any]) -> None:
            built = [attempt.result() for attempt in [threads.submit(call) for _ in range(3)]]
            assert built[0] == built[1] == built[2]
            future.set_result(built[0])

        options = replace(OPTIONS, container=container)
        convert(archives, tmp_path / "out", split="train", plan_options=options, executor=Engine(thrice))

    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_a_call_whose_task_is_cancelled_does_not_stay_pending() -> None:
    call, task = Future[int](), Future[int]()
    task.cancel()
    jobs._settle(call, task)

    with pytest.raises(CancelledError):
        call.result(0)


def test_the_head_is_not_silent_because_this_process_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "HEAD_INTERVAL_S", 0.01)
    monkeypatch.setattr(jobs, "HEAD_SILENT_S", 0.1)
    executor: Any = SimpleNamespace(_end=threading.Event(), _silent="")
    monkeypatch.setattr(jobs, "_is_reachable", lambda _: time.sleep(0.2) or executor._end.set())

    RayExecutor._watch(executor, "head")

    assert not executor._silent


def test_a_call_that_is_made_while_the_head_is_declared_silent_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "HEAD_INTERVAL_S", 0.01)
    monkeypatch.setattr(jobs, "HEAD_SILENT_S", -1.0)

    def sent(*_: object) -> object:
        executor._watch("127.0.0.1:1")  # which ends here, before the call is known
        return SimpleNamespace(future=Future)

    def remote(**_: object) -> Callable[[object], object]:
        return lambda call: SimpleNamespace(remote=sent)

    connected = SimpleNamespace(client=SimpleNamespace(ray=SimpleNamespace(is_connected=lambda: True)))
    ray: Any = SimpleNamespace(util=connected, is_initialized=lambda: True, remote=remote)
    monkeypatch.setitem(sys.modules, "ray", ray)
    executor = RayExecutor()

    with pytest.raises(ConnectionError, match="does not answer"):
        executor.submit(int, "7").result(10)
