"""A Loader and a flow of a URL deliver what those of the local copy do, within the limit of a cache."""

import asyncio
import errno
import os
import resource
import signal
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from threading import active_count
from typing import Any

import pytest

from shardprep.formats import open_dataset, read_manifest
from shardprep.formats.errors import ShardprepError, UsageError
from shardprep.formats.runtime.files import hash_file
from shardprep.formats.runtime.loop_thread import LoopThread, call_in_thread
from shardprep.formats.storage.cache import CacheTooSmall
from shardprep.formats.storage.store import RemoteMissing
from shardprep.loaders import Flow, GlobalShuffle, LocalShuffle
from shardprep.loaders.loader.ahead import THREADS
from support.column_datasets import write_columns
from support.datasets import flip, prep_here, tree
from support.faulty_proxy import Proxy
from support.loaded import assert_same, epoch_of, kept, loader_on
from support.loader_workers import Imported
from support.sampling import torture_except
from support.terminal_screen import Terminal
from support.waiting import until


@pytest.fixture(scope="module")
def buckets(lmdb_shards: Path) -> Path:
    """The folder of the server's buckets."""
    return lmdb_shards.parent.parent


@pytest.fixture(scope="module")
def bucket_url(lmdb_shards: Path) -> str:
    """The URL of the dataset."""
    return f"s3://{lmdb_shards.parent.name}/{lmdb_shards.name}"


def limit_of(path: Path, share: float) -> int:
    """The bytes of a share of a dataset's shards, and of all its tables."""
    manifest = read_manifest(path)
    return int(sum(shard.size for shard in manifest.shards) * share) + sum(t.size for t in manifest.tables)


def cached(cache: Path) -> dict[Path, int]:
    """The files of a cache, each with its size."""
    found = {}
    for path in (cache / "files").rglob("*"):
        with suppress(FileNotFoundError):  # evicted meanwhile
            if path.is_file():
                found[path] = path.stat().st_size
    return found


def bytes_in(cache: Path) -> int:
    return sum(cached(cache).values())


HALF = LocalShuffle(30)
ORDERS: dict[str, dict[str, Any]] = {
    "stored order": {"shuffle": None},
    "a window": {"shuffle": HALF, "workers": 2},
    "a rank": {"shuffle": HALF, "rank": 1, "world_size": 3, "drop_last": True},
    "partitions": {"shuffle": LocalShuffle(60, partitions=4), "rank": 1, "world_size": 2},
    "a subset": {"shuffle": HALF, "records": range(5, 190, 3)},
    "all at once": {"shuffle": GlobalShuffle()},
    "some left out": {"shuffle": HALF, "without": range(5, 190, 3)},
    "steps left out": {"shuffle": HALF},
}

NEEDED = {"all at once": 1.0, "a subset": 0.8}  # of the bytes of all shards


@pytest.mark.parametrize(
    "name",
    torture_except(ORDERS, *(name for name in ORDERS if "workers" not in ORDERS[name]), "stored order"),
)
def test_batches_states_and_identity_are_those_of_the_local_copy(
    lmdb_shards: Path, proxy: Proxy, bucket_url: str, tmp_path: Path, name: str
) -> None:
    order = ORDERS[name]
    limit = limit_of(lmdb_shards, NEEDED.get(name, 0.6))
    with (
        loader_on(lmdb_shards, **order) as local,
        loader_on(bucket_url, cache=tmp_path / "c", cache_limit=limit, **order) as remote,
    ):
        assert remote.identity == local.identity
        list(map(kept, islice(local, 3)))
        remote.load_state_dict(local.state_dict())
        local.load_state_dict(local.state_dict())
        if name == "steps left out":
            local.skip(range(4, 9))
            remote.skip(range(4, 9))
        for _ in range(2):
            assert_same(epoch_of(remote), epoch_of(local))
            assert bytes_in(tmp_path / "c") <= limit
        assert remote.state_dict() == local.state_dict()
        assert remote.receipt() == local.receipt()


def test_each_shard_comes_at_most_once_an_epoch_and_those_used_soonest_stay(
    lmdb_shards: Path, proxy: Proxy, bucket_url: str, tmp_path: Path
) -> None:
    limit, shards, epochs = limit_of(lmdb_shards, 0.45), len(read_manifest(lmdb_shards).shards), 4
    with loader_on(
        bucket_url, cache=tmp_path / "c", cache_limit=limit, shuffle=LocalShuffle(20), workers=1
    ) as loader:
        for _ in range(epochs):
            for _ in loader:
                assert bytes_in(tmp_path / "c") <= limit
        storage = loader.stats().storage
        assert str(loader.stats())
    downloads = Counter(path for path, _ in proxy.asked if "shard-" in path)
    assert max(downloads.values()) <= epochs + 1  # the fifth epoch is prefetched
    assert sum(downloads.values()) < (epochs + 1) * shards * 0.85
    assert storage.downloaded_bytes > limit
    assert storage.hits


def test_the_least_limit_is_named_before_training_and_works(lmdb_shards: Path, tmp_path: Path) -> None:
    url, options = lmdb_shards.as_uri(), {"cache": tmp_path / "c", "shuffle": LocalShuffle(20)}
    with pytest.raises(CacheTooSmall, match="a smaller window") as caught:
        loader_on(url, cache_limit="100kB", **options)
    with pytest.raises(CacheTooSmall):
        loader_on(url, cache_limit=caught.value.needed - 1, **options)
    with (
        loader_on(url, cache_limit=caught.value.needed, **options) as remote,
        loader_on(lmdb_shards, shuffle=LocalShuffle(20)) as local,
    ):
        assert_same(epoch_of(remote), epoch_of(local))
    with pytest.raises(CacheTooSmall, match="LocalShuffle"):
        loader_on(url, cache_limit=caught.value.needed, **(options | {"shuffle": GlobalShuffle()}))


def test_an_order_that_needs_all_shards_at_once_may_open_more_files(
    lmdb_shards: Path, tmp_path: Path
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len([*Path("/proc/self/fd").iterdir()]) + 15, hard))
    try:
        with loader_on(lmdb_shards.as_uri(), shuffle=GlobalShuffle(), cache=tmp_path / "c") as loader:
            assert len(epoch_of(loader)) == len(loader)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_error_of_the_server_comes_after_the_batches_before_it(
    lmdb_shards: Path, proxy: Proxy, bucket_url: str, tmp_path: Path
) -> None:
    bad = read_manifest(lmdb_shards).shards[6].name
    proxy.fault = lambda path, count: "404" if path.endswith(bad) else None
    with loader_on(bucket_url, cache=tmp_path / "c", shuffle=None, workers=1, batch_size=4) as loader:
        batches = iter(loader)
        assert len(epoch_of(batches, 6)) == 6
        with pytest.raises(RemoteMissing) as caught:
            epoch_of(batches)
        assert bad in str(caught.value)
        assert bucket_url in str(caught.value)


def test_a_loader_whose_cache_is_gone_ends_its_threads(lmdb_shards: Path, tmp_path: Path) -> None:
    loader = loader_on(lmdb_shards.as_uri(), cache=tmp_path / "c")
    next(iter(loader))
    (tmp_path / "c").rename(tmp_path / "elsewhere")
    loader.close()
    of_downloads = ("shardprep-prefetch", "shardprep-loop")
    assert not any(thread.name.startswith(of_downloads) for thread in threading.enumerate())


def test_a_closed_loader_leaves_its_room_to_others_although_an_epoch_of_it_is_left_open(
    lmdb_shards: Path, tmp_path: Path
) -> None:
    url, options = lmdb_shards.as_uri(), {"cache": tmp_path / "c", "shuffle": LocalShuffle(20)}
    with pytest.raises(CacheTooSmall) as caught:
        loader_on(url, cache_limit="100kB", **options)
    options["cache_limit"] = caught.value.needed
    first = loader_on(url, workers=1, **options)
    left_open = iter(first)
    epoch_of(left_open, 3)
    first.close()

    with loader_on(url, **options) as second, loader_on(lmdb_shards, shuffle=LocalShuffle(20)) as local:
        assert_same(epoch_of(second), epoch_of(local))
    with pytest.raises(ShardprepError, match="closed"):  # the loader, or its cache
        epoch_of(left_open)  # some of its batches may have been ready


@pytest.mark.slow
def test_workers_do_not_import_the_client_and_may_die(bucket_url: str, proxy: Proxy, tmp_path: Path) -> None:
    with loader_on(bucket_url, cache=tmp_path / "c", transform=Imported(("obstore",)), workers=2) as loader:
        numbers = []
        for imported, _, batch in loader:
            assert not imported.any()
            numbers += batch.tolist()
            if len(numbers) == 20:
                worker, *_ = loader.engine._dispatcher._workers.values()  # type: ignore[union-attr]
                os.kill(worker.process.pid, signal.SIGKILL)
        assert sorted(numbers) == list(range(len(loader.dataset)))
        until(lambda: loader.stats().restarts == 1)


def test_shards_come_ahead_of_the_records_that_are_drawn(
    lmdb_shards: Path, proxy: Proxy, bucket_url: str, tmp_path: Path
) -> None:
    flow = Flow.from_dataset(bucket_url, cache=tmp_path / "c")
    items = iter(flow)
    first = next(items)
    manifest = read_manifest(lmdb_shards)
    until(lambda: len(cached(tmp_path / "c")) == len([*manifest.shards, *manifest.tables]))
    asked = len(proxy.asked)

    assert [first, *items] == list(Flow.from_dataset(lmdb_shards))
    assert len(proxy.asked) == asked


def test_a_shard_that_cannot_be_downloaded_does_not_keep_the_others_from_coming_ahead(
    lmdb_shards: Path, proxy: Proxy, bucket_url: str, tmp_path: Path
) -> None:
    manifest = read_manifest(lmdb_shards)
    bad = manifest.shards[1].name
    proxy.fault = lambda path, count: "404" if path.endswith(bad) else None
    with closing(Flow.from_dataset(bucket_url, cache=tmp_path / "c")) as flow:
        items = iter(flow)
        next(items)
        until(lambda: len(cached(tmp_path / "c")) == len([*manifest.shards, *manifest.tables]) - 1)

        with pytest.raises(RemoteMissing, match=f"{bad}.*publish it there again"):
            list(items)


def test_the_leases_of_a_served_flow_share_one_open_cache(
    lmdb_shards: Path, bucket_url: str, proxy: Proxy, tmp_path: Path
) -> None:
    opened: list[set[Path]] = []
    with closing(Flow.from_dataset(bucket_url, cache=tmp_path / "c")) as flow:
        for first in (0, 100):
            with closing(flow.pick(0, range(first, first + 20))) as lease:  # as a sender draws it
                next(lease)
                opened.append({*(tmp_path / "c/readers").iterdir()})
        assert [*flow.pick(0, [7])] == [*Flow.from_dataset(lmdb_shards).pick(0, [7])]

    assert opened[0] == opened[1]


def test_a_resumed_pass_downloads_the_shards_that_are_left(
    lmdb_shards: Path, proxy: Proxy, bucket_url: str, tmp_path: Path
) -> None:
    done = sum(shard.records for shard in read_manifest(lmdb_shards).shards[:-2])
    local, remote = Flow.from_dataset(lmdb_shards), Flow.from_dataset(bucket_url, cache=tmp_path / "c")
    items = iter(local)
    for _ in range(done + 1):
        next(items)
    local.load_state_dict(local.state_dict())
    remote.load_state_dict(local.state_dict())
    expected = list(local)

    assert list(remote) == expected
    assert len(expected) == len(local) - done - 1
    assert len({path for path, _ in proxy.asked if "shard-" in path}) == 2


def test_a_pass_that_ends_early_leaves_shards_that_are_on_their_way_to_the_next(
    lmdb_shards: Path, proxy: Proxy, bucket_url: str, tmp_path: Path
) -> None:
    slow = tuple(shard.name for shard in read_manifest(lmdb_shards).shards[1:])
    proxy.fault = lambda path, count: "drip" if path.endswith(slow) else None
    flow = Flow.from_dataset(bucket_url, cache=tmp_path / "c").take(1)
    first = [*flow]
    until(lambda: all(proxy.ranges_of(name) for name in slow[: THREADS - 1]))
    for _ in range(3):
        assert [*flow] == first
    flow.close()  # at once, and not after hours

    assert max(len(proxy.ranges_of(name)) for name in slow) == 1
    assert not any(thread.name == "shardprep-prefetch" for thread in threading.enumerate())
    assert not list((tmp_path / "c/parts").iterdir())


PROGRAM = """
import sys
from shardprep.loaders import EvalTransform, Loader
from shardprep.loaders.measuring import watched

url, cache = sys.argv[1:]
with Loader(url, cache=cache, batch_size=10, shuffle=None, transform=EvalTransform(32), workers=0) as train:
    for _ in watched(train, title="train"):
        pass
    print("then", train.stats().storage.shards)
"""


def test_the_first_batch_of_all_is_waited_for_with_its_downloads_shown(
    lmdb_shards: Path, bucket_url: str, proxy: Proxy, tmp_path: Path
) -> None:
    proxy.fault = lambda path, count: "stall" if "shard-" in path else None
    terminal = Terminal(PROGRAM, bucket_url, tmp_path / "cache", columns=100)
    terminal.until(r"0%\|.*storage .* 0 of \d+ shards begun")
    terminal.process.kill()
    terminal.end()


@pytest.mark.usefixtures("proxy")
def test_a_flow_that_cannot_be_made_leaves_nothing_open(bucket_url: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="seed"):
        Flow.from_dataset(bucket_url, cache=tmp_path / "c", seed=-1)

    assert not list((tmp_path / "c/readers").iterdir())


def test_a_replay_of_a_closed_loader_leaves_nothing_open(lmdb_shards: Path, tmp_path: Path) -> None:
    cache = {"cache": tmp_path / "c", "cache_limit": limit_of(lmdb_shards, 0.5)}
    with loader_on(lmdb_shards.as_uri(), shuffle=LocalShuffle(20), **cache) as loader:
        first = epoch_of(loader, 1)
    before = active_count()
    assert_same([kept(loader.replay(0, 0).batch)], first)

    assert active_count() == before
    assert not list((tmp_path / "c" / "readers").iterdir())


def test_a_replay_of_a_closed_loader_goes_on_while_another_one_ends(
    lmdb_shards: Path, proxy: Proxy, bucket_url: str, tmp_path: Path
) -> None:
    loader = loader_on(bucket_url, cache=tmp_path / "c", shuffle=None)
    loader.close()
    asked, released = proxy.block(read_manifest(lmdb_shards).shards[-1].name)
    with loader_on(lmdb_shards, shuffle=None) as local, ThreadPoolExecutor(1) as pool:
        last = len(local) - 1
        replayed = pool.submit(loader.replay, 0, last)
        assert asked.wait(60)
        assert_same([kept(loader.replay(0, 0).batch)], [kept(local.replay(0, 0).batch)])
        released.set()
        assert_same([kept(replayed.result(20).batch)], [kept(local.replay(0, last).batch)])


def test_a_loop_that_ends_needs_no_thread_and_calls_what_none_can(monkeypatch: pytest.MonkeyPatch) -> None:
    async def late() -> int:
        await asyncio.get_running_loop().shutdown_default_executor()
        return await call_in_thread(int, "7")

    with LoopThread(threads=1) as loop:
        assert loop.run(late()) == 7
        monkeypatch.setattr("threading.Thread.start", None)  # calling it is an error


def copies_of(cache: Path, names: str = "") -> list[Path]:
    """The files of the one dataset in a cache that begin with these names."""
    (folder,) = (cache / "datasets").iterdir()
    return [path.resolve() for path in sorted(folder.glob(f"{names}*")) if path.is_symlink()]


def by_dataset(url: str, cache: Path) -> list[Any]:
    with open_dataset(url, cache=cache) as found:
        names = found.columns.names
        return [(record, [record.columns[name] for name in names]) for record in found]  # type: ignore[attr-defined]


def by_flow(url: str, cache: Path) -> list[Any]:
    return list(Flow.from_dataset(url, cache=cache, with_keys=True))


@pytest.mark.parametrize("read", [by_dataset, by_flow])
@pytest.mark.parametrize("name", ["shard", "index", "column-age", "column-caption-", "column-caption.npy"])
def test_a_dataset_and_a_flow_read_what_was_published(
    tmp_path: Path, name: str, read: Callable[[str, Path], list[Any]]
) -> None:
    write_columns(tmp_path / "columns")
    url, cache = (tmp_path / "columns").as_uri(), tmp_path / "c"
    expected = repr(read(url, cache))
    for copy in copies_of(cache, name):
        for position in range(150, copy.stat().st_size, 11):
            flip(copy, position)

    assert repr(read(url, cache)) == expected
    assert all(hash_file(copy) == f"sha256:{copy.name}" for copy in copies_of(cache, name))


def test_for_columns_alone_no_images_are_downloaded(tmp_path: Path) -> None:
    write_columns(tmp_path / "columns")
    options = {"transform": None, "columns": ["caption"], "batch_size": 4}
    with loader_on((tmp_path / "columns").as_uri(), cache=tmp_path / "c", **options) as loader:
        list(loader)
    for name, is_there in ("shard", False), ("column-caption", True), ("column-sound-", False):
        assert {copy.exists() for copy in copies_of(tmp_path / "c", name)} == {is_there}


def test_a_bad_sector_below_a_copy_is_a_copy_that_the_disk_did_not_keep(
    lmdb_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_dataset(lmdb_shards.as_uri(), cache=tmp_path / "c") as found:
        first = found[0]
        (inode,) = {path.stat().st_ino for path in copies_of(tmp_path / "c", "shard") if path.exists()}

        def failing(call: Callable[..., Any]) -> Callable[..., Any]:
            def read(descriptor: int, *where: Any) -> Any:
                if os.fstat(descriptor).st_ino == inode:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                return call(descriptor, *where)

            return read

        for name in ("pread", "preadv"):
            monkeypatch.setattr(os, name, failing(getattr(os, name)))
        assert found[0] == first


def test_the_folder_of_a_cache_is_not_repaired_or_written_to(lmdb_shards: Path, tmp_path: Path) -> None:
    with open_dataset(lmdb_shards.as_uri(), cache=tmp_path / "c") as found:
        assert found[0]
        folder = found.path
    flip(copies_of(tmp_path / "c", "shard")[0], 5000)
    before = tree(tmp_path / "c")

    for words in (
        ("repair", folder, "--source", lmdb_shards.as_uri()),
        ("repair", folder, "--source", lmdb_shards.parent / "archives"),
        ("fetch", lmdb_shards.as_uri(), folder),
        ("fetch", lmdb_shards.as_uri(), tmp_path / "c/a/b"),
    ):
        done = prep_here(*words, "--quiet")
        assert (done.returncode, "in a cache" in done.stderr) == (2, True), done.stderr
    assert tree(tmp_path / "c") == before
