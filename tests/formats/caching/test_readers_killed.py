"""Readers of one cache that are killed at any moment leave nothing wrong, and nothing that stays."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardprep.formats import read_manifest
from shardprep.formats.storage.cache import FileCache
from shardprep.formats.storage.store import Location
from support.faulty_proxy import Proxy
from support.repository import ROOT

PROGRAM = ROOT / "tests/support/cache_readers.py"
BLOCK = 4096  # a file takes whole blocks of the disk
URL = "s3://bucket/splits/train"


@pytest.mark.slow
@pytest.mark.parametrize("kills", [12, pytest.param(120, marks=pytest.mark.torture)])
def test_readers_that_are_killed_leave_no_wrong_file_and_keep_the_limit(
    bucket: Path, proxy: Proxy, tmp_path: Path, kills: int
) -> None:
    shards = read_manifest(bucket / "splits/train").shards
    cache, limit = tmp_path / "cache", int(0.45 * sum(shard.size for shard in shards))
    listed = [[shard.name, shard.size, shard.sha256, shard.records] for shard in shards]
    asked = {"url": URL, "cache": str(cache), "limit": limit, "kills": kills, "listed": listed}

    done = subprocess.run(
        [sys.executable, PROGRAM], input=json.dumps(asked), capture_output=True, text=True, timeout=300
    )

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["wrong"] == [], done.stderr
    assert 0 < found["largest"] <= limit + BLOCK * len(shards)
    with FileCache(cache, limit, Location.parse(URL)) as files, files.hold(shards[:2]):
        pass
    assert not [*(cache / "parts").iterdir(), *(cache / "readers").iterdir()]
    for path in (cache / "files").glob("*/*"):
        assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name
