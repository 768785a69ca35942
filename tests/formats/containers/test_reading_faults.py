"""Shards that change or fail while they are read: a system error is no damage, and damage gives no signal."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardprep.formats import open_dataset
from shardprep.formats.errors import ShardDamaged
from shardprep.formats.shards.in_place import ARCHIVE_NAME
from shardprep.formats.shards.read import ALL_CONTAINERS, CONTAINERS, container
from support.loaded import epoch_of, loader_on
from support.sampling import torture_except
from support.shard_files import THREE, stored, write

STRACE = shutil.which("strace")


@pytest.fixture(params=torture_except(ALL_CONTAINERS, "lmdb"))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


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
