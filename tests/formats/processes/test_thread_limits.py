"""If the system allows no further thread, the error says what to do, and nothing is left."""

from __future__ import annotations

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
from support.thread_room import no_room


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
