"""If the system allows no further thread, the error says what to do, and nothing is left."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats import OperationError, convert, verify
from shardprep.formats.runtime.workers import WorkerPool
from shardprep.formats.storage.open import open_dataset
from shardprep.loaders import Flow, Loader, LocalShuffle
from shardprep.loaders.engine.engine import Engine
from shardprep.loaders.loader.read_ahead import ReadAhead, ShardStream
from shardprep.loaders.remote import RemoteSource
from support.engine_workers import Writing, layout
from support.thread_room import NO_ROOM, no_room


def engine(path: Path) -> None:
    Engine(Writing(), layout(4), workers=1)


def loader(path: Path) -> None:
    Loader(path, batch_size=4, workers=1)


def loader_that_reads_ahead(path: Path) -> None:
    with Loader(path, batch_size=4, shuffle=LocalShuffle(9), workers=0) as made:
        next(iter(made))


def read_ahead(path: Path) -> None:
    shards = open_dataset(path).blocks
    ReadAhead(ShardStream.of(path, shards, np.arange(len(shards))), budget=1)


def pool(path: Path) -> None:
    with WorkerPool(2) as made:
        made.submit(abs, 1)


def conversion(path: Path) -> None:
    convert(path.parent / "archives", path.parent / "no-room", split="val", workers=1)


def conversion_here(path: Path) -> None:
    convert(path.parent / "archives", path.parent / "no-room", split="val", workers=0)


def verification(path: Path) -> None:
    verify(path)


def threads(path: Path) -> None:
    with closing(iter(Flow.from_iterable(range(9)).map(abs, threads=2))) as items:  # type: ignore[type-var]
        next(items)


def prefetch(path: Path) -> None:
    with closing(iter(Flow.from_iterable(range(9)).prefetch(2))) as items:  # type: ignore[type-var]
        next(items)


def processes(path: Path) -> None:
    with Flow.from_iterable(range(9)).map(abs, processes=1) as flow:
        next(iter(flow))


def remote(path: Path) -> None:
    RemoteSource("tcp://127.0.0.1:*")


@pytest.mark.parametrize(
    "start",
    [
        *(engine, loader, loader_that_reads_ahead, read_ahead, pool, conversion, conversion_here, verification),
        *(threads, prefetch, processes, remote),
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


def test_after_it_there_is_room_again_the_same_things_work(lmdb_shards: Path) -> None:
    flow = Flow.from_iterable(range(9)).map(abs, threads=2)
    with no_room(), pytest.raises(OperationError):
        list(flow)

    assert list(flow) == list(range(9))


def test_some_threads_of_several_are_ended_where_the_others_have_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        started(thread)
        threading.stack_size(NO_ROOM)

    monkeypatch.setattr(threading.Thread, "start", start)
    try:
        with pytest.raises(OperationError, match="no room"):
            list(Flow.from_iterable(range(9)).map(abs, threads=3))
    finally:
        threading.stack_size(0)


def test_a_command_says_it_in_one_line(archives: Path, tmp_path: Path) -> None:
    script = f"""
import sys, threading
from shardprep.cli.app import run
threading.stack_size({NO_ROOM})
sys.exit(run(["convert", {str(archives)!r}, {str(tmp_path / "out")!r}, "--workers", "1", "--quiet"]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)

    assert done.returncode == 3
    assert done.stderr.startswith("prep: the system has no room for another thread")
    assert len(done.stderr.splitlines()) == 1


def test_a_worker_without_room_for_a_thread_says_so_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, threading\n"
        f"if 'spawn_main' in ' '.join(sys.orig_argv): threading.stack_size({NO_ROOM})\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Engine(Writing(), layout(4), workers=1) as made, pytest.raises(OperationError, match="no room"):
        next(made.run([np.arange(4)]))
