"""A dataset with columns as a source: converted, killed in between, and repaired."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from shardprep.formats import (
    PlanMismatch,
    PlanOptions,
    read_manifest,
    repair,
)
from shardprep.formats.records.schema import Schema
from support.column_datasets import EVERY_KIND, write_columns
from support.datasets import converted, prep, tree, writable


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("columns") / "source"
    write_columns(folder, 20, options=PlanOptions(shard_size=9000))
    return folder


def test_a_copy_has_the_content_root_of_its_source(source: Path, tmp_path: Path) -> None:
    same = converted(source, tmp_path / "out", container="hdf5", **like(source))

    assert same.content_root == read_manifest(source).content_root


def like(dataset: Path) -> dict[str, object]:
    plan = read_manifest(dataset).plan
    return {"order": plan["order"], "seed": plan["seed"]}


@pytest.fixture
def copied(source: Path, tmp_path: Path) -> Path:
    """A dataset that was converted from the source, to be damaged."""
    converted(source, tmp_path / "copied", container="hdf5", shard_size=9000)
    return tmp_path / "copied"


@pytest.mark.torture
def test_every_damaged_file_of_the_columns_is_rebuilt_by_the_command(source: Path, copied: Path) -> None:
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
