"""Shards that change or fail while they are read: a system error is no damage, and damage gives no signal."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats import open_dataset
from shardprep.formats.errors import ShardDamaged
from shardprep.formats.shards.in_place import ARCHIVE_NAME
from shardprep.formats.shards.read import ALL_CONTAINERS, CONTAINERS, container
from support.loaded import epoch_of, loader_on
from support.loader_workers import CutShort, Tagging
from support.sampling import torture_except
from support.shard_files import THREE, address, opened, read, stored, write

STRACE = shutil.which("strace")


@pytest.fixture(params=torture_except(ALL_CONTAINERS, "lmdb"))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def copy(lmdb_shards: Path, tmp_path: Path) -> Path:
    """A dataset that may be damaged."""
    return Path(shutil.copytree(lmdb_shards, tmp_path / "copy"))


READING = """
import errno, os, sys
from pathlib import Path
from shardprep.formats.shards.read import container
from support import shard_files

kind, path = sys.argv[1], Path(sys.argv[2])
found = {"opening": [], "reading": [], "right": 0}

def attempt(where, call):
    try:
        return call()
    except OSError as error:
        assert error.filename in (str(path), str(path.with_name("archive.tar"))), error
        assert where == "opening" or "at record" in str(error), error
        found[where].append(errno.errorcode[error.errno])

for _ in range(10):
    if (reader := attempt("opening", lambda: container(kind).read(path))) is None:
        continue
    if (shard := attempt("opening", lambda: shard_files.opened(path, kind, 3))) is None:
        continue
    for ordinal, record in enumerate(shard_files.THREE * 4):
        ordinal %= 3
        stored = attempt("reading", lambda: reader.checked(ordinal))
        there = attempt("reading", lambda: reader.address(ordinal))
        image = there and attempt("reading", lambda: shard.image(ordinal, there))
        assert stored is None or stored[:4] == record[:4]
        assert image in (None, record.image)
        found["right"] += (stored is not None) + (image is not None)
    reader.close()
    shard.close()
print(sorted(set(found["opening"])), sorted(set(found["reading"])), found["right"])
"""


def under_strace(kind: str, path: Path, *injections: str) -> tuple[list[str], list[str], int]:
    """The errors in opening and in reading, and the number of records read."""
    rules = [word for injection in injections for word in ("-e", f"inject={injection}")]
    command = [
        STRACE,
        "-f",
        "-qq",
        "-o",
        "/dev/null",
        "-P",
        path,
        "-P",
        path.with_name(ARCHIVE_NAME),
        *rules,
        sys.executable,
        "-c",
        READING,
        kind,
        path,
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    opening, reading, right = done.stdout.replace("] [", "]|[").replace("] ", "]|").split("|")
    return eval(opening), eval(reading), int(right)  # noqa: S307


@pytest.mark.skipif(not STRACE, reason="strace is not installed")
@pytest.mark.parametrize(
    ("of_open", "of_read"),
    [
        ("EMFILE", "EIO"),
        pytest.param("EACCES", "ESTALE", marks=pytest.mark.torture),
        pytest.param("ENOMEM", "ENOMEM", marks=pytest.mark.torture),
        pytest.param("ENFILE", "ETIMEDOUT", marks=pytest.mark.torture),
    ],
)
def test_an_error_of_the_system_is_no_damage_wherever_it_comes(
    kind: str, tmp_path: Path, of_open: str, of_read: str
) -> None:
    path = write(tmp_path / "shard", kind, THREE)
    opening, reading, right = under_strace(
        kind, path, f"openat:error={of_open}:when=1+4", f"pread64,preadv:error={of_read}:when=2+5"
    )

    assert of_open in opening
    assert set(opening) <= {of_open, of_read}
    assert reading == [of_read]
    assert right > 0


@pytest.mark.slow
@pytest.mark.skipif(not STRACE, reason="strace is not installed")
def test_a_read_that_a_signal_interrupts_is_made_again(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / "shard", kind, THREE)

    found = under_strace(kind, path, "openat,pread64,preadv:error=EINTR:when=1+2")

    assert found == ([], [], 10 * 24)


@contextmanager
def limited(which: int, value: int) -> Iterator[None]:
    before = resource.getrlimit(which)
    resource.setrlimit(which, (value, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(which, before)


def test_no_descriptor_left_is_no_damage(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / "shard", kind, THREE)
    assert read(path, kind, 3) == THREE  # everything that reading imports is open
    following = os.dup(0)
    os.close(following)

    with limited(resource.RLIMIT_NOFILE, following), pytest.raises(OSError, match="shard") as raised:
        container(kind).read(path)

    assert raised.value.errno == errno.EMFILE


LITTLE_MEMORY = """
import errno, resource, sys
from pathlib import Path
from shardprep.formats.shards.read import container
import numpy as np

kind, path = sys.argv[1], Path(sys.argv[2])
container(kind).read(path).close()
pages = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
found = set()
for more in [0, *(1 << bits for bits in range(16, 28))]:
    resource.setrlimit(resource.RLIMIT_AS, (pages + more, resource.RLIM_INFINITY))
    try:
        with container(kind).read(path) as reader:
            for ordinal in range(0, len(reader), 999):
                reader.checked(ordinal)
        found.add("read")
    except OSError as error:
        assert error.filename in (str(path), str(path.with_name("archive.tar")))
        found.add(errno.errorcode[error.errno])
    except MemoryError:
        found.add("ENOMEM")
print(sorted(found))
"""


@pytest.mark.slow
def test_too_little_memory_is_no_damage(kind: str, tmp_path: Path) -> None:
    many = [stored(f"{n:01000d}", n, b"") for n in range(5000)]
    path = write(tmp_path / "shard", kind, [stored("large", 1, bytes(40 << 20)), *many])

    command = [sys.executable, "-c", LITTLE_MEMORY, kind, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    # The interpreter itself may say on stderr that it had too little memory for a warning.
    assert (done.returncode, done.stdout) == (0, "['ENOMEM', 'read']\n")


@pytest.mark.parametrize("at_once", [1, 7, 10_000])
def test_what_the_kernel_gives_piece_by_piece_is_whole(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    path = write(tmp_path / "shard", kind, THREE)
    pread, preadv = os.pread, os.preadv
    monkeypatch.setattr(os, "pread", lambda file, size, at: pread(file, min(size, at_once), at))
    monkeypatch.setattr(os, "preadv", lambda file, parts, at: preadv(file, [parts[0][:at_once]], at))

    with closing(opened(path, kind, 3)) as shard:
        images = [
            shard.image_in(n, address(THREE[n]), lambda size: np.empty(size, np.uint8)).tobytes()
            for n in range(3)
        ]
    assert read(path, kind, 3) == THREE
    assert images == [record.image for record in THREE]


@pytest.mark.parametrize("kind", CONTAINERS)
@pytest.mark.parametrize("transform", [{}, {"transform": None}], ids=["decoded", "encoded"])
def test_a_bad_sector_is_not_skipped_and_names_the_record(
    lmdb_shards: Path,
    hdf5_shards: Path,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    transform: dict[str, Any],
) -> None:
    path = {"lmdb": lmdb_shards, "hdf5": hdf5_shards}[kind]
    with open_dataset(path) as dataset:
        entry, key = dataset.manifest.shards[0], dataset[7].key
        place = (path / entry.name).read_bytes().index(dataset[7].image)
    for name in ("pread", "preadv"):
        monkeypatch.setattr(os, name, _failing(getattr(os, name), path / entry.name, place))

    with (
        loader_on(path, shuffle=None, on_bad_record="skip", **transform) as loader,
        pytest.raises(OSError, match=f"Input/output error, at record 7: .*{entry.name}") as raised,
    ):
        epoch_of(loader)

    assert raised.value.errno == errno.EIO
    assert key in raised.value.__notes__[0]


def _failing(call: Callable[..., Any], file: Path, place: int) -> Callable[..., Any]:
    status = file.stat()

    def failing(descriptor: int, what: Any, at: int) -> Any:
        if (
            at == place
            and os.path.sameopenfile(descriptor, descriptor)
            and os.fstat(descriptor).st_ino == status.st_ino
        ):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return call(descriptor, what, at)

    return failing


@pytest.mark.slow
@pytest.mark.parametrize("workers", torture_except([0, 1], 0))
def test_what_a_shard_that_is_cut_short_has_lost_can_be_skipped(copy: Path, workers: int) -> None:
    with open_dataset(copy) as dataset:
        shard, key = dataset.manifest.shards[0], dataset[5].key
        lost = [dataset[number].key for number in range(6, shard.records)]
    transform = Tagging({key: CutShort(copy / shard.name)})
    with loader_on(copy, transform=transform, shuffle=None, workers=workers, on_bad_record="skip") as loader:
        epoch_of(loader)
        restarts = loader.stats().restarts

    assert sorted(loader.skipped) == sorted(lost)
    assert all("ends before record" in reason for reason in loader.skipped.values())
    assert restarts == 0


def test_damage_in_the_tree_is_of_the_records_below_it_alone(tmp_path: Path) -> None:
    records = [stored(f"n{n}", n, bytes([n % 251]) * 9000) for n in range(600)]
    path = write(tmp_path / "shard", "lmdb", records)
    page, data = os.sysconf("SC_PAGE_SIZE"), bytearray(path.read_bytes())
    leaves = [
        at
        for at in range(0, len(data), page)
        if data[at + 10 : at + 12] == b"\2\0" and data[at : at + 8] == (at // page).to_bytes(8, "little")
    ]
    data[leaves[0] + 10] = 0xFF
    path.write_bytes(data)

    lost = []
    with container("lmdb").read(path) as reader:
        for ordinal, record in enumerate(records):
            try:
                assert reader.checked(ordinal)[:4] == record[:4]
            except ShardDamaged as error:
                lost.append((ordinal, error.message))
    assert 0 < len(lost) < 300
    assert all(f"cannot be read at record {ordinal}: page" in message for ordinal, message in lost)
