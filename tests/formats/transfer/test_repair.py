"""Repair rebuilds exactly what is damaged, to the same root."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from shardprep.formats import OperationError, PlanMismatch, PlanOptions, UsageError, make_sample, repair
from shardprep.formats.records.schema import Schema
from support.column_datasets import EVERY_KIND, write_columns
from support.datasets import converted, flip, prep, tree, writable
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

    assert repair(dataset, archives, workers=1).exit_code == 0
    assert tree(dataset) == before
    untouched = inodes.keys() - damaged - {".prep"}
    assert {name: (dataset / name).stat().st_ino for name in untouched} == {n: inodes[n] for n in untouched}


def test_another_source_is_refused(dataset: Path, archives: Path, tmp_path: Path) -> None:
    make_sample(tmp_path / "other", classes=4, train_per_class=6, val=10, test=3, seed=99)
    for source, root in ((tmp_path / "nowhere", None), (archives, tmp_path / "nowhere")):
        with pytest.raises(UsageError, match="nowhere: does not exist"):  # also if nothing is damaged
            repair(dataset, source, root=root)
    assert repair(dataset, tmp_path / "other").exit_code == 0  # nothing is damaged, so it is not read
    damage(dataset)

    with pytest.raises(PlanMismatch):
        repair(dataset, tmp_path / "other")


def test_a_shard_that_comes_out_otherwise_is_not_published(dataset: Path, own: Path) -> None:
    train = own / "ILSVRC2012_img_train.tar"
    data = train.read_bytes()  # with another number of a table in every image:
    train.write_bytes(data.replace(b"\xff\xdb\x00\x43\x00", b"\xff\xdb\x00\x43\x01"))
    victim = sorted(dataset.glob("shard-*"))[0]
    victim.unlink()

    with pytest.raises(OperationError, match="its bytes differ from the published ones"):
        repair(dataset, own, workers=0)
    assert not victim.exists()


@pytest.mark.torture
def test_every_damaged_file_of_the_columns_is_rebuilt_by_the_command(tmp_path: Path) -> None:
    source, copied = tmp_path / "source", tmp_path / "copied"
    write_columns(source, 20, options=PlanOptions(shard_size=9000))
    converted(source, copied, container="hdf5", shard_size=9000)
    before = tree(copied)
    for number, path in enumerate(sorted(copied.glob("column-*"))):
        writable(path).write_bytes(path.read_bytes()[: 100 * (number % 3)])

    done = prep("repair", copied, "--source", source)

    assert done.returncode == 0, done.stderr
    assert tree(copied) == before


def test_a_source_with_another_value_publishes_nothing(tmp_path: Path) -> None:
    schema = Schema([EVERY_KIND["age"], EVERY_KIND["caption"]])
    write_columns(tmp_path / "source", 4, schema)
    converted(tmp_path / "source", tmp_path / "out")
    shutil.rmtree(tmp_path / "source")
    write_columns(tmp_path / "source", 4, schema, instead={"age": bytes([7, *bytes(7)])})
    damaged = tmp_path / "out" / "column-age.npy"
    damaged.unlink()

    with pytest.raises(PlanMismatch, match="another source"):
        repair(tmp_path / "out", tmp_path / "source", workers=0)

    assert not damaged.exists()
    assert np.load(tmp_path / "out" / "index.npy").size == 4
