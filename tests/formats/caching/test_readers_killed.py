"""A cache whose readers are killed, or whose disk is full, leaves nothing wrong, and says so."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardprep.formats import read_manifest
from shardprep.formats.storage.cache import FileCache
from shardprep.formats.storage.store import Location
from support.datasets import is_root
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


PRELUDE = """
import os, sys
from contextlib import suppress
from pathlib import Path
from shardprep.formats import NoSpace, open_dataset, read_manifest
from shardprep.formats.storage.cache import CacheTooSmall, FileCache
from shardprep.formats.storage.store import Location
from shardprep.loaders import GlobalShuffle, Loader, LocalShuffle

path, disk = map(Path, sys.argv[1:])
url, cache, others = path.as_uri(), disk / "cache", disk / "others"

def fill():
    with others.open("ab", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass
"""
FILLED = """
shards = read_manifest(path).shards
with FileCache(cache, None, Location.parse(url), patience_s=0.5) as files:
    with files.hold(shards[:1]):
        fill()
        try:
            files.hold(shards[1:2])
        except CacheTooSmall as error:
            print("too small:", error)
        except NoSpace as error:
            print(error)
    others.unlink()
    with files.hold(shards[1:2]):
        print("held")
"""
BOUNDED = """
made = {"batch_size": 5, "shuffle": LocalShuffle(20), "workers": 2, "with_numbers": True}
with (
    Loader(path, **made) as local,
    open_dataset(url, cache=cache) as idle,
    Loader(url, cache=cache, **made) as remote,
):
    first = [idle[number].key for number in range(len(idle))]
    for _ in range(4):
        for ours, theirs in zip(remote, local, strict=True):
            assert ours[-1].tolist() == theirs[-1].tolist()
    assert first == [record.key for record in idle]
    print("trained")
"""
FULL = """
fill()
try:
    open_dataset(url, cache=cache)
except NoSpace as error:
    print(error)
others.unlink()
with Loader(url, cache=cache, batch_size=5, workers=0) as loader:
    count = sum(1 for _ in loader)
    fill()
    assert os.statvfs(disk).f_bavail == 0
    print(count == sum(1 for _ in loader))
"""
SMALL = """
try:
    Loader(url, cache=cache, batch_size=8, shuffle=GlobalShuffle())
except CacheTooSmall as error:
    print(error)
"""


def on_small_disk(program: str, size: int, dataset: Path, disk: Path) -> str:
    """Run a program with a disk of that size, and return what it prints."""
    if not is_root() or not shutil.which("unshare"):
        pytest.skip("needs leave to mount")
    disk.mkdir()
    script = 'mount -t tmpfs -o size="$1" tmpfs "$5" && exec "$2" -c "$3" "$4" "$5"'
    mounted = ["unshare", "-m", "sh", "-c", script, "sh", str(size)]
    command = [*mounted, sys.executable, PRELUDE + program, dataset, disk]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_disk_that_others_fill_is_an_error_and_goes_on_when_there_is_room(
    lmdb_shards: Path, tmp_path: Path
) -> None:
    size = sum(shard.size for shard in read_manifest(lmdb_shards).shards[:2]) + (1 << 20)

    said = on_small_disk(FILLED, size, lmdb_shards, tmp_path / "disk").splitlines()

    assert said[0].endswith("the disk is full; make room and try again")
    assert said[1:] == ["held"]


def test_a_cache_that_is_opened_on_a_full_disk_says_so_and_one_that_has_all_files_goes_on(
    lmdb_shards: Path, tmp_path: Path
) -> None:
    size = read_manifest(lmdb_shards).size + (4 << 20)

    said = on_small_disk(FULL, size, lmdb_shards, tmp_path / "disk").splitlines()

    assert "the disk is full; make room" in said[0]
    assert said[1:] == ["True"]


def test_a_disk_that_is_too_small_for_the_order_is_found_before_the_first_batch(
    lmdb_shards: Path, tmp_path: Path
) -> None:
    size = read_manifest(lmdb_shards).size // 2

    said = on_small_disk(SMALL, size, lmdb_shards, tmp_path / "disk")

    assert "the disk has room for" in said
    assert "make room on it" in said


@pytest.mark.slow
def test_a_training_goes_on_in_a_cache_that_only_its_disk_bounds(lmdb_shards: Path, tmp_path: Path) -> None:
    """Files that are evicted while workers and an idle dataset have them open take no room."""
    manifest = read_manifest(lmdb_shards)
    size = manifest.size - sum(shard.size for shard in manifest.shards) // 2

    assert on_small_disk(BOUNDED, size + (1 << 20), lmdb_shards, tmp_path / "disk") == "trained\n"
