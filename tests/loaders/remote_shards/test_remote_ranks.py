"""Ranks on one machine share a cache: each shard comes once, within the limit, also when one is killed."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from shardprep.formats import read_manifest
from shardprep.loaders import LocalShuffle
from support.cached_shards import bytes_in, limit_of
from support.faulty_proxy import Proxy
from support.loaded import epoch_of, loader_on, numbers_in
from support.repository import SUPPORT

pytestmark = pytest.mark.slow

EPOCHS = 3
PROGRAM = """
import json, sys
from support.loaded import loader_on
from shardprep.loaders import LocalShuffle

if __name__ == "__main__":
    url, cache, limit, rank, partitions = sys.argv[1:]
    shuffle = LocalShuffle(20, partitions=int(partitions))
    with loader_on(
        url, cache=cache, cache_limit=int(limit), rank=int(rank), world_size=2, shuffle=shuffle, drop_last=True
    ) as loader:
        for _ in range(3):
            for *_, numbers in loader:
                print(json.dumps(numbers.tolist()), flush=True)
                sys.stdin.readline()
"""


@contextmanager
def rank_of(folder: Path, *words: object) -> Iterator[subprocess.Popen[str]]:
    """A rank that waits for a line after each of its batches, as one that exchanges gradients."""
    program = folder / "train.py"
    program.write_text(PROGRAM)
    with subprocess.Popen(
        [sys.executable, str(program), *map(str, words)],
        env=os.environ | {"PYTHONPATH": SUPPORT},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def batch_of(rank: subprocess.Popen[str]) -> list[int]:
    assert rank.stdout
    found: list[int] = json.loads(rank.stdout.readline())
    return found


def go_on(rank: subprocess.Popen[str]) -> None:
    assert rank.stdin
    rank.stdin.write("\n")
    rank.stdin.flush()


def expected(path: Path, rank: int, partitions: int) -> list[list[int]]:
    shuffle = LocalShuffle(20, partitions=partitions)
    with loader_on(path, rank=rank, world_size=2, shuffle=shuffle, drop_last=True) as loader:
        return [numbers_in([batch]) for _ in range(EPOCHS) for batch in epoch_of(loader)]


@pytest.mark.torture
@pytest.mark.parametrize(("partitions", "share"), [(1, 0.5), pytest.param(2, 0.6, marks=pytest.mark.torture)])
def test_two_ranks_download_each_shard_once_an_epoch_at_most(
    lmdb_shards: Path, proxy: Proxy, bucket_url: str, tmp_path: Path, partitions: int, share: float
) -> None:
    limit, cache = limit_of(lmdb_shards, share), tmp_path / "c"
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(rank_of(tmp_path, bucket_url, cache, limit, rank, partitions))
            for rank in (0, 1)
        ]
        for batches in zip(*(expected(lmdb_shards, rank, partitions) for rank in (0, 1)), strict=True):
            assert [batch_of(rank) for rank in ranks] == list(batches)
            assert bytes_in(cache) <= limit
            for rank in ranks:
                go_on(rank)
        assert [rank.wait(timeout=60) for rank in ranks] == [0, 0]
    downloads = Counter(path for path, _ in proxy.asked if "shard-" in path)
    assert max(downloads.values()) <= EPOCHS + 1  # the next epoch is prefetched
    assert sum(downloads.values()) < (EPOCHS + 1) * len(read_manifest(lmdb_shards).shards)
