"""Verification finds every kind of damage, names it, and never crashes on it."""

import os
import random
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock, patch

import numpy as np
import pytest

from shardprep.formats import Finding, ManifestDamaged, ShardDamaged, open_dataset, verify
from shardprep.formats.runtime.progress import NoProgress
from shardprep.formats.shards.read import CONTAINERS
from support.datasets import converted, flip, writable
from support.resealed import reseal, with_rows
from support.sampling import torture_except


@pytest.fixture(scope="session", params=torture_except(CONTAINERS, "lmdb"))
def intact(request: pytest.FixtureRequest, archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Few shards, because each is read in a separate process."""
    output = tmp_path_factory.mktemp("intact") / request.param
    converted(archives, output, container=request.param, shard_size=250_000)
    return output


def shards(dataset: Path) -> list[Path]:
    return sorted(dataset.glob("shard-*"))


def findings(dataset: Path, level: str = "full") -> list[Finding]:
    return verify(dataset, level=level).findings


def test_any_flipped_byte_of_any_file_is_found(dataset: Path) -> None:
    rng = random.Random(0)
    files = [*shards(dataset), dataset / "index.npy", dataset / "boxes.npy"]
    for _ in range(60):
        file = rng.choice(files)
        position, bit = rng.randrange(file.stat().st_size), rng.randrange(8)
        flip(file, position, bit)

        assert [f.file for f in findings(dataset)] == [file.name]
        flip(file, position, bit)


@patch("shardprep.formats.runtime.jobs.POLL_INTERVAL_S", 0.002)
def test_decoding_shows_progress_within_a_shard(archives: Path, tmp_path: Path) -> None:
    converted(archives, tmp_path / "d", shard_size=1 << 30)
    progress = Mock(wraps=NoProgress())
    assert verify(tmp_path / "d", level="decode", progress=progress).findings == []
    done = [call.args[0] for call in progress.at.call_args_list]
    assert done == sorted(done)
    assert len({*done}) > 2  # not only none and all


@pytest.mark.slow
def test_records_level_names_the_damaged_record(dataset: Path) -> None:
    with open_dataset(dataset) as ds:
        victim = ds[2]
        shard = shards(dataset)[int(ds.index["shard"][2])]
    flip(shard, shard.read_bytes().index(bytes(victim.image[-200:-100])))

    assert [f.file for f in findings(dataset, "records") if f.key == victim.key] == [shard.name]


@pytest.mark.parametrize("change", [-1, -5000, 1, 5000])
def test_a_shard_of_another_size_is_found_without_opening_it(dataset: Path, change: int) -> None:
    victim = writable(shards(dataset)[1])
    os.truncate(victim, victim.stat().st_size + change)

    assert [f.file for f in findings(dataset, "quick")] == [victim.name]
    with open_dataset(dataset) as ds, pytest.raises(ShardDamaged):
        ds.shard(1)


@pytest.mark.parametrize("name", ["shard", "index.npy", "boxes.npy"])
def test_a_missing_file_is_found(dataset: Path, name: str) -> None:
    victim = shards(dataset)[2] if name == "shard" else dataset / name
    victim.unlink()

    assert findings(dataset, "quick") == [Finding(victim.name, "is missing")]


@pytest.mark.parametrize(
    "make", [Path.touch, Path.mkdir, os.mkfifo, lambda path: path.symlink_to(shards(path.parent)[0])]
)
def test_what_does_not_belong_is_found(dataset: Path, make: Callable[[Path], object]) -> None:
    make(stranger := dataset / "shard-99999.lmdb")

    assert [f.file for f in findings(dataset, "quick")] == [stranger.name]


def test_without_a_manifest_a_dataset_is_incomplete(dataset: Path) -> None:
    (dataset / "manifest.json").unlink()

    assert verify(dataset).exit_code == 1
    with pytest.raises(ManifestDamaged):
        open_dataset(dataset)


@pytest.mark.slow
def test_an_index_and_a_content_root_that_lie_are_found_at_records_level(dataset: Path) -> None:
    reseal(dataset, lambda manifest: manifest.update(content_root="blake3:" + "0" * 64))
    assert [f.file for f in findings(dataset, "records")] == ["manifest.json"]

    with_rows(dataset, "index.npy", lambda rows: rows["label"].__setitem__(0, rows["label"][0] + 1))
    assert findings(dataset) == []
    key = np.load(dataset / "index.npy")["key"][0].decode()
    assert [f.key for f in findings(dataset, "records")] == [key]
