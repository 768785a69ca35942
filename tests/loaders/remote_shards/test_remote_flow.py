"""A flow of a dataset at a URL downloads the shards ahead of a pass."""

import threading
from pathlib import Path
from time import monotonic

from shardprep.formats import read_manifest
from shardprep.loaders import Flow
from support.cached_shards import cached
from support.faulty_proxy import Proxy
from support.waiting import until


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


def test_a_resumed_pass_downloads_the_shards_that_are_left(
    lmdb_shards: Path, proxy: Proxy, bucket_url: str, tmp_path: Path
) -> None:
    manifest = read_manifest(lmdb_shards)
    done = sum(shard.records for shard in manifest.shards[:-2])
    local, remote = Flow.from_dataset(lmdb_shards), Flow.from_dataset(bucket_url, cache=tmp_path / "c")
    items = iter(local)
    for _ in range(done + 1):
        next(items)
    local.load_state_dict(local.state_dict())
    remote.load_state_dict(local.state_dict())
    expected = list(local)

    assert list(remote) == expected
    assert len(expected) == len(local) - done - 1
    shards = {path for path, _ in proxy.asked if "shard-" in path}
    assert len(shards) == 2


def test_a_pass_that_ends_early_does_not_wait_for_shards_on_their_way(
    lmdb_shards: Path, proxy: Proxy, bucket_url: str, tmp_path: Path
) -> None:
    others = [shard.name for shard in read_manifest(lmdb_shards).shards[1:]]
    proxy.fault = lambda path, count: "drip" if path.endswith(tuple(others)) else None
    flow = Flow.from_dataset(bucket_url, cache=tmp_path / "c").take(1)
    items = iter(flow)
    next(items)
    until(lambda: any(path.endswith(others[2]) for path, _ in proxy.asked))

    began = monotonic()
    assert not list(items)

    assert monotonic() - began < 3
    assert not any(thread.name == "shardprep-prefetch" for thread in threading.enumerate())
    assert not list((tmp_path / "c/parts").iterdir())
