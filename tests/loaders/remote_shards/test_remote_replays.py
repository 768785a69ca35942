"""A loader of a URL replays after it was closed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, active_count

import pytest

from shardprep.formats import read_manifest
from shardprep.formats.runtime.loop_thread import LoopThread, in_thread
from shardprep.loaders import Loader, LocalShuffle, TrainTransform
from support.cached_shards import limit_of
from support.faulty_proxy import Proxy
from support.loaded import assert_same, epoch_of, kept, loader_on


@pytest.fixture
def remote(lmdb_shards: Path, tmp_path: Path) -> Callable[..., Loader]:
    """What makes loaders of the records at a URL, with little room."""
    cache = {"cache": tmp_path / "c", "cache_limit": limit_of(lmdb_shards, 0.5)}
    options = {"shuffle": LocalShuffle(20), "transform": TrainTransform(16), **cache}
    return lambda **others: loader_on(lmdb_shards.as_uri(), **(options | others))


def test_a_replay_of_a_closed_loader_leaves_nothing_open(
    remote: Callable[..., Loader], tmp_path: Path
) -> None:
    with remote() as loader:
        first = epoch_of(loader, 1)
    before = active_count()
    assert_same([kept(loader.replay(0, 0).batch)], first)

    assert active_count() == before
    assert not list((tmp_path / "c" / "readers").iterdir())


def test_a_replay_of_a_closed_loader_goes_on_while_another_one_ends(
    lmdb_shards: Path, proxy: Proxy, bucket_url: str, tmp_path: Path
) -> None:
    slow = read_manifest(lmdb_shards).shards[-1].name
    asked, released = Event(), Event()

    def fault(path: str, count: int) -> None:
        if path.endswith(slow):
            asked.set()
            released.wait(20)

    loader = loader_on(bucket_url, cache=tmp_path / "c", shuffle=None)
    loader.close()
    proxy.fault = fault
    with loader_on(lmdb_shards, shuffle=None) as local, ThreadPoolExecutor(1) as pool:
        last = len(local) - 1
        replayed = pool.submit(loader.replay, 0, last)
        assert asked.wait(20)
        assert_same([kept(loader.replay(0, 0).batch)], [kept(local.replay(0, 0).batch)])
        released.set()
        assert_same([kept(replayed.result(20).batch)], [kept(local.replay(0, last).batch)])


def test_a_loop_that_ends_calls_what_no_thread_can() -> None:
    async def late() -> int:
        await asyncio.get_running_loop().shutdown_default_executor()
        return await in_thread(int, "7")

    with LoopThread(threads=1) as loop:
        assert loop.run(late()) == 7
