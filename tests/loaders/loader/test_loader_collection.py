"""A loader of a collection: parts of all kinds, and parts that were changed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shardprep.formats import DataError, ManifestDamaged, UsageError, collect, open_dataset
from shardprep.formats.storage import collection as collections
from shardprep.loaders import Flow, GlobalShuffle, Loader, LocalShuffle
from support.column_datasets import write_columns
from support.cut_datasets import collected
from support.datasets import converted, flip
from support.loaded import assert_exactly_once, epoch_of, loader_on, numbers_in
from support.loader_workers import Tagging


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


def test_parts_of_different_containers_are_shuffled_together(
    lmdb_shards: Path, hdf5_shards: Path, tmp_path: Path
) -> None:
    converted(lmdb_shards.parent / "archives", tmp_path / "val", split="val")
    with collect(tmp_path / "all", [tmp_path / "val", hdf5_shards]) as made:
        keys = [record.key for record in made]
    with loader_on(tmp_path / "all", transform=None, shuffle=GlobalShuffle(), columns=None) as loader:
        batches = epoch_of(loader)
        assert_exactly_once(loader, batches)
        assert [loader.key(n) for n in range(len(keys))] == keys
        images = {int(n): image for batch in batches for image, n in zip(batch[0], batch[-1], strict=True)}
    for number in (0, 9, 10, 100, 213):
        assert images[number] == made[number].image


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


def test_a_flow_has_the_order_of_the_loader(lmdb_shards: Path, folder: Path) -> None:
    options = {"shuffle": LocalShuffle(60), "seed": 3, "with_keys": True}

    assert list(Flow.from_dataset(folder, **options)) == list(Flow.from_dataset(lmdb_shards, **options))


def test_a_part_that_was_replaced_is_refused_by_the_loader(lmdb_shards: Path, tmp_path: Path) -> None:
    folder = collected(lmdb_shards, tmp_path, 5)
    flip(tmp_path / "part-1/manifest.json", 400)

    with pytest.raises(DataError, match="the part part-1"):
        Loader(folder, transform=Tagging(), workers=0)


def test_a_shard_that_is_gone_is_named_with_its_part(lmdb_shards: Path, tmp_path: Path) -> None:
    folder = collected(lmdb_shards, tmp_path, 5)
    gone = tmp_path / "part-1" / open_dataset(tmp_path / "part-1").manifest.shards[0].name
    gone.unlink()

    with loader_on(folder, shuffle=None) as loader, pytest.raises(OSError, match=gone.name) as caught:
        epoch_of(loader)
    assert Path(str(caught.value.filename)).parent.samefile(gone.parent)


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


WEIGHTS = {"part-0": 0.5, "part-1": 0.2, "part-2": 0.3}


def counts_of_parts(loader: Loader, numbers: list[int]) -> list[int]:
    ends = [part.records.stop for part in loader.dataset.parts]
    return np.bincount(np.searchsorted(ends, numbers, side="right"), minlength=3).tolist()


def test_weights_count_the_chosen_records(folder: Path) -> None:
    with loader_on(folder, weights=WEIGHTS, classes=[0, 2], shuffle=GlobalShuffle()) as loader:
        numbers = numbers_in(epoch_of(loader))
        labels = set(loader.dataset.index["label"][np.array(numbers)].tolist())
        assert labels == {0, 2}
        assert counts_of_parts(loader, numbers) == [51, 20, 31]
        assert loader.shuffle_quality().records == len(numbers) == 102


def test_a_dataset_is_one_part(lmdb_shards: Path) -> None:
    with pytest.raises(UsageError, match=f"one number for each of {lmdb_shards.name}"):
        loader_on(lmdb_shards, weights=WEIGHTS)
