"""A cache on a disk that is too small, or that others have filled, is an error that says so."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from datasets import is_root

from shardprep.formats import read_manifest

FILLED = """
import sys
from pathlib import Path
from shardprep.formats import NoSpace, read_manifest
from shardprep.formats.dataset.remote.caching.file_cache import FileCache
from shardprep.formats.dataset.remote.caching.room import CacheTooSmall
from shardprep.formats.system.storage.location import Location

path, disk = map(Path, sys.argv[1:])
shards = read_manifest(path).shards
with FileCache(disk / "cache", None, Location.parse(path.as_uri()), patience_s=0.5) as cache:
    with cache.hold(shards[:1]):
        with (disk / "others").open("wb", buffering=0) as others:
            try:
                while others.write(bytes(4096)):
                    pass
            except OSError:
                pass
        try:
            cache.hold(shards[1:2])
        except CacheTooSmall as error:
            print("too small:", error)
        except NoSpace as error:
            print(error)
    (disk / "others").unlink()
    with cache.hold(shards[1:2]):
        print("held")
"""
SMALL = """
import sys
from pathlib import Path
from shardprep.formats.dataset.remote.caching.room import CacheTooSmall
from shardprep.loaders import GlobalShuffle, Loader

path, disk = map(Path, sys.argv[1:])
try:
    Loader(path.as_uri(), cache=disk / "cache", batch_size=8, shuffle=GlobalShuffle())
except CacheTooSmall as error:
    print(error)
"""


def on_small_disk(program: str, size: int, dataset: Path, disk: Path) -> str:
    """Run a program with a disk of that size, and return what it prints."""
    if not is_root() or not shutil.which("unshare"):
        pytest.skip("needs leave to mount")
    disk.mkdir()
    script = 'mount -t tmpfs -o size="$1" tmpfs "$5" && exec "$2" -c "$3" "$4" "$5"'
    command = ["unshare", "-m", "sh", "-c", script, "sh", str(size), sys.executable, program, dataset, disk]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_disk_that_others_fill_is_an_error_and_goes_on_when_there_is_room(
    lmdb_shards: Path, tmp_path: Path
) -> None:
    size = sum(shard.size for shard in read_manifest(lmdb_shards).shards[:2]) + (1 << 20)

    said = on_small_disk(FILLED, size, lmdb_shards, tmp_path / "disk").splitlines()

    assert said[0].endswith("the disk is full; make room and run the same command again")
    assert said[1:] == ["held"]


def test_a_disk_that_is_too_small_for_the_order_is_found_before_the_first_batch(
    lmdb_shards: Path, tmp_path: Path
) -> None:
    size = read_manifest(lmdb_shards).size // 2

    said = on_small_disk(SMALL, size, lmdb_shards, tmp_path / "disk")

    assert "the disk has room for" in said
    assert "make room on it" in said
