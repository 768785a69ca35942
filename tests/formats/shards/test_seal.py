"""The seal of a verified index: it spares a hash, and is trusted for the very file that was verified."""

import hashlib
import os
import time
from pathlib import Path
from unittest.mock import Mock, patch

import numpy as np
import pytest

from shardprep.formats import ManifestDamaged, open_dataset
from shardprep.formats.shards import read as reading, read as seals
from shardprep.formats.shards.read import Seal
from support.datasets import flip, writable


@pytest.fixture(autouse=True)
def hashed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Mock:
    """The module of hashes, counting; a cache folder of its own, and seals for files of any size and age."""
    counting, now = Mock(wraps=hashlib), time.time_ns()
    monkeypatch.setattr(reading, "hashlib", counting)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(seals, "MIN_BYTES", 1)
    monkeypatch.setattr(seals.time, "time_ns", lambda: now + 60_000_000_000)  # no ctime can be set
    return counting


@pytest.fixture
def dataset(lmdb_shards: Path, tmp_path: Path) -> Path:
    """The manifest and an index of its own, changed long ago."""
    folder = tmp_path / "dataset"
    folder.mkdir()
    for name in ("manifest.json", "index.npy"):
        (folder / name).write_bytes((lmdb_shards / name).read_bytes())
    return folder


def opened(dataset: Path) -> np.ndarray:
    with open_dataset(dataset) as ds:
        return ds.index.copy()


def test_a_changed_file_has_no_seal(dataset: Path) -> None:
    opened(dataset)
    status = (dataset / "index.npy").stat()
    flip(dataset / "index.npy", 300)
    os.utime(dataset / "index.npy", ns=(status.st_atime_ns, status.st_mtime_ns))  # ctime tells

    with pytest.raises(ManifestDamaged, match="does not match the manifest"):
        opened(dataset)


def test_a_file_that_changes_while_it_is_read_or_cannot_be_flushed_gets_no_seal(dataset: Path) -> None:
    before = (path := dataset / "index.npy").stat()

    with writable(path).open() as file:
        assert not Seal(before, "root").store(file.fileno())
        unflushed = patch.object(os, "fsync", Mock(side_effect=OSError))(Seal(path.stat(), "root").store)
        assert [unflushed(file.fileno()), Seal(path.stat(), "root").store(file.fileno())] == [False, True]


@pytest.mark.parametrize("damage", [b"", b"shardprep seal 1\n", b"\xff" * 9000])
def test_a_damaged_seal_costs_a_hash(dataset: Path, hashed: Mock, damage: bytes) -> None:
    opened(dataset)
    (path,) = (seals.caches_folder() / "seals").iterdir()
    writable(path).write_bytes(damage)
    before = hashed.sha256.call_count

    opened(dataset)

    assert hashed.sha256.call_count > before


@pytest.mark.parametrize("blocked", ["cache", "cache/shardprep/seals"])
def test_without_room_for_seals_datasets_open(dataset: Path, tmp_path: Path, blocked: str) -> None:
    (tmp_path / blocked).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / blocked).write_bytes(b"a file where a folder belongs")

    assert len(opened(dataset)) == len(opened(dataset))
