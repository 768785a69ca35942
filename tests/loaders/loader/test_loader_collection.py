"""A loader of a collection: parts of all kinds, and parts that were changed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shardprep.formats import ManifestDamaged, collect, open_dataset
from shardprep.formats.storage import collection as collections
from shardprep.loaders import Flow, LocalShuffle
from support.column_datasets import write_columns
from support.cut_datasets import collected
from support.datasets import flip
from support.loaded import epoch_of, loader_on


@pytest.fixture(scope="module")
def cut_shards(lmdb_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A collection of three parts of the dataset, in stored order."""
    return collected(lmdb_shards, tmp_path_factory.mktemp("cut"), 3, 7)


@pytest.fixture(params=["in memory", "read from files"])
def folder(
    request: pytest.FixtureRequest, cut_shards: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """The collection, with its indexes in memory, or with rows that are read when they are needed."""
    if request.param != "in memory":
        monkeypatch.setattr(collections, "MOST_INDEX_BYTES", 0)
    return cut_shards


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.torture)])
def test_columns_are_those_of_their_parts(tmp_path: Path, workers: int) -> None:
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder, records in zip(folders, (12, 19), strict=True):
        write_columns(folder, records)
    wanted = [record for folder in folders for record in open_dataset(folder)]
    names = ("age", "caption", "boxes", "image")

    with collect(tmp_path / "all", folders) as made:
        for record, of_part in zip(made, wanted, strict=True):
            for name in made.schema.names:
                np.testing.assert_equal(record[name], of_part[name])
    options = {"transform": None, "columns": names, "workers": workers, "shuffle": LocalShuffle(8)}
    with loader_on(tmp_path / "all", **options) as loader:
        for values, _, numbers in epoch_of(loader):
            for row, number in enumerate(numbers.tolist()):
                np.testing.assert_equal(values["age"][row], wanted[number]["age"])
                np.testing.assert_equal(values["boxes"][row], wanted[number]["boxes"])
                assert values["caption"][row] == wanted[number]["caption"]
    for item, record in zip(Flow.from_dataset(tmp_path / "all", columns=names), wanted, strict=True):
        assert item[0]["caption"] == record["caption"]


def test_a_cut_index_is_an_error_of_the_step(
    lmdb_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collections, "MOST_INDEX_BYTES", 0)
    folder = collected(lmdb_shards, tmp_path, 5)
    with loader_on(folder, shuffle=None) as loader:
        batches = iter(loader)
        next(batches)
        flip(tmp_path / "part-0/index.npy", 300)
        with pytest.raises(ManifestDamaged, match="changed since it was verified"):
            list(batches)
