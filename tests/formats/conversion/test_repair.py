"""Repair rebuilds exactly what is damaged, to the same root."""

import os
import shutil
from pathlib import Path

import pytest

from shardprep.formats import OperationError, PlanMismatch, repair
from support.datasets import converted, flip, tree, writable
from support.sampling import torture_except


@pytest.fixture(params=torture_except(["lmdb", "hdf5"], "hdf5"))
def dataset(request: pytest.FixtureRequest, archives: Path, tmp_path: Path) -> Path:
    converted(archives, tmp_path / "dataset", container=request.param)
    return tmp_path / "dataset"


def damage(dataset: Path) -> set[str]:
    """Three shards: one bit flipped, one cut short, one gone."""
    flipped, cut, gone = sorted(dataset.glob("shard-*"))[:3]
    flip(flipped, 4321)
    os.truncate(writable(cut), 5000)
    gone.unlink()
    return {flipped.name, cut.name, gone.name}


@pytest.mark.slow
def test_exactly_the_damaged_shards_are_rebuilt(dataset: Path, archives: Path) -> None:
    before = tree(dataset)
    damaged = damage(dataset)
    inodes = {p.name: p.stat().st_ino for p in dataset.iterdir()}

    report = repair(dataset, archives, workers=1)

    assert report.exit_code == 0
    assert tree(dataset) == before
    untouched = inodes.keys() - damaged - {".prep"}
    assert {name: (dataset / name).stat().st_ino for name in untouched} == {n: inodes[n] for n in untouched}


def test_another_source_is_refused(dataset: Path, archives: Path, tmp_path: Path) -> None:
    from shardprep.formats import make_sample

    make_sample(tmp_path / "other", classes=4, train_per_class=6, val=10, test=3, seed=99)
    damage(dataset)

    with pytest.raises(PlanMismatch):
        repair(dataset, tmp_path / "other")


def test_a_shard_that_comes_out_otherwise_is_not_published(
    dataset: Path, archives: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(archives, source)
    train = source / "ILSVRC2012_img_train.tar"
    data = train.read_bytes()
    train.write_bytes(
        data.replace(b"\xff\xdb\x00\x43\x00", b"\xff\xdb\x00\x43\x01")
    )  # a table's number in every image
    victim = sorted(dataset.glob("shard-*"))[0]
    victim.unlink()

    with pytest.raises(OperationError, match="different bytes"):
        repair(dataset, source, workers=0)
    assert not victim.exists()
