"""Repair rebuilds exactly what is damaged, to the same root."""

import os
import shutil
from pathlib import Path

import pytest

from shardprep.formats import ManifestDamaged, OperationError, PlanMismatch, repair, verify
from support.datasets import converted, flip, prep, tree, writable
from support.repository import ROOT
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


@pytest.mark.parametrize("table", ["index.npy", "boxes.npy"])
def test_damaged_tables_are_rebuilt(dataset: Path, archives: Path, table: str) -> None:
    before = tree(dataset)
    flip(dataset / table, 300)

    assert repair(dataset, archives, workers=0).exit_code == 0
    assert tree(dataset) == before


def test_a_damaged_quarantine_list_is_rebuilt(archives: Path, tmp_path: Path) -> None:
    source = tmp_path / "source" / "cat"
    source.mkdir(parents=True)
    for number, name in enumerate(["a.jpg", "b.jpg"]):
        shutil.copy(ROOT / "formats/data/photographs/coffee.jpg", source / name)
        if number:
            (source / name).write_bytes(b"no image")
    converted(source.parent, tmp_path / "out", on_bad_image="skip")
    before = tree(tmp_path / "out")
    (tmp_path / "out" / "quarantine.json").unlink()

    assert repair(tmp_path / "out", source.parent, workers=0).exit_code == 0
    assert tree(tmp_path / "out") == before


def test_repairing_what_is_intact_does_nothing(dataset: Path, archives: Path) -> None:
    before = {p: p.stat().st_ino for p in dataset.iterdir()}

    assert repair(dataset, archives).exit_code == 0
    assert {p: p.stat().st_ino for p in dataset.iterdir()} == before


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


def test_a_damaged_manifest_cannot_be_repaired_and_says_so(dataset: Path, archives: Path) -> None:
    flip(dataset / "manifest.json", 50)

    with pytest.raises(ManifestDamaged):
        repair(dataset, archives)


def test_foreign_files_are_reported_and_left_alone(dataset: Path, archives: Path) -> None:
    (dataset / "notes.txt").write_text("mine")
    damage(dataset)

    report = repair(dataset, archives, workers=0)

    assert [f.file for f in report.findings] == ["notes.txt"]
    assert (dataset / "notes.txt").read_text() == "mine"


@pytest.mark.slow
def test_the_command_ends_with_the_same_root(dataset: Path, archives: Path) -> None:
    root = verify(dataset).manifest.root  # type: ignore[union-attr]
    damage(dataset)

    done = prep("repair", dataset, "--source", archives)

    assert done.returncode == 0, done.stderr
    assert root in done.stdout
