"""A cache whose readers are killed, or whose disk is full, leaves nothing wrong, and says so."""

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shardprep.formats import read_manifest
from shardprep.formats.storage.cache import FileCache
from shardprep.formats.storage.store import Location
from support.faulty_proxy import Proxy
from support.repository import ROOT
from support.sampling import needs_mounts, needs_strace

PROGRAM = ROOT / "tests/support/cache_readers.py"
BLOCK = 4096  # a file takes whole blocks of the disk
URL = "s3://bucket/shards/train"


@pytest.mark.slow
@pytest.mark.parametrize("kills", [12, pytest.param(120, marks=pytest.mark.torture)])
def test_readers_that_are_killed_leave_no_wrong_file_and_keep_the_limit(
    bucket: Path, proxy: Proxy, tmp_path: Path, kills: int
) -> None:
    shards = read_manifest(bucket / "shards/train").shards
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
shards = read_manifest(path).shards

def fill():
    with others.open("ab", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass
"""
FILLED = """
with FileCache(cache, None, Location.parse(url), patience_s=0.5) as files:
    with files.hold(shards[:1]):
        fill()
        try:
            files.hold(shards[1:2])
        except NoSpace as error:
            print(error)
    others.unlink()
    with files.hold(shards[1:2]):
        print("held")
"""
LEFT = """
with FileCache(cache, None, Location.parse(url)) as files:
    files.hold(shards[:1]).release()
    (cache / "parts" / f"{64 * '0'}.part").write_bytes(bytes(shards[1].size))
    files.hold(shards[1:2]).release()
    print(files.hold_cached(shards[:1]) is not None)
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
files = FileCache(cache, None, Location.parse(url))
fill()
for use in (lambda: open_dataset(url, cache=cache), lambda: files.folder.publish(read_manifest(path))):
    try:
        use()
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


QUOTA = """
with FileCache(cache, None, Location.parse(url)) as files:
    for shard in shards[:2]:
        with files.hold([shard]):
            print([file.size == shard.size for file in files.folder.cached_files()])
"""
TRACED = {QUOTA: "strace -f -qq -o/dev/null -etrace=fallocate -einject=fallocate:error=EDQUOT:when=2"}


@needs_mounts
@pytest.mark.parametrize(
    ("program", "size", "said"),
    [
        (FILLED, lambda whole, two: two + (1 << 20), r".*the disk is full; make room and try again\nheld\n"),
        (LEFT, lambda whole, two: two + (1 << 20) + (1 << 16), r"True\n"),
        (FULL, lambda whole, two: whole + (4 << 20), r"(.*the disk is full; make room.*\n){2}True\n"),
        pytest.param(
            QUOTA, lambda whole, two: whole + (4 << 20), r"\[True\]\n\[True\]\n", marks=needs_strace
        ),
        (SMALL, lambda whole, two: whole // 2, r".*the disk has room for.*make room on it.*\n"),
        pytest.param(
            BOUNDED, lambda whole, two: whole // 2 + (1 << 20), r"trained\n", marks=pytest.mark.slow
        ),
    ],
    ids=[
        "that others fill is an error, and the cache goes on when there is room",
        "that a killed download fills is emptied before anything is evicted",
        "that is full is an error, and a cache that has all files goes on",
        "whose quota is used up makes the cache evict what nobody reads",
        "that is too small for the order is found before the first batch",
        "that alone bounds the cache takes a training, as files that are evicted while open take no room",
    ],
)
def test_a_disk(
    program: str, size: Callable[[int, int], int], said: str, lmdb_shards: Path, tmp_path: Path
) -> None:
    manifest, disk = read_manifest(lmdb_shards), tmp_path / "disk"
    wanted = size(manifest.size, sum(shard.size for shard in manifest.shards[:2]))
    disk.mkdir()
    script = 'mount -t tmpfs -o size="$1" tmpfs "$5" && exec $6 "$2" -c "$3" "$4" "$5"'
    mounted = ["unshare", "-m", "sh", "-c", script, "sh", str(wanted)]
    command = [*mounted, sys.executable, PRELUDE + program, lmdb_shards, disk, TRACED.get(program, "")]

    done = subprocess.run(command, capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stderr
    assert re.fullmatch(said, done.stdout), done.stdout
