"""Loaders of collections, of images that stay in the official tars, and of a billion records."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardprep.formats import ManifestDamaged, collect, make_sample, open_dataset
from shardprep.formats.conversion import finish as finalize
from shardprep.formats.storage import collection as collections
from shardprep.loaders import Flow, GlobalShuffle, Loader, LocalShuffle, SortedByClass
from support import billion_records
from support.column_datasets import write_columns
from support.cut_datasets import collected
from support.datasets import converted, flip
from support.loaded import assert_exactly_once, assert_same, epoch_of, loader_on


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


TRAIN = "ILSVRC2012_img_train.tar"


@pytest.fixture(scope="module")
def archives_of_20(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """160 images of 20 classes."""
    folder = tmp_path_factory.mktemp("archives-of-20")
    make_sample(folder, classes=20, train_per_class=8, val=1, test=1)
    return folder


@pytest.fixture(scope="module")
def in_place(archives_of_20: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Their index, in tables of 30 images and blocks of one or two."""
    output = tmp_path_factory.mktemp("in-place") / "train"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finalize, "BLOCK_BYTES", 30_000)
        converted(archives_of_20, output, container="tar", order="archive", shard_size=900_000)
    return output


def encoded(path: Path, **options: Any) -> Loader:
    return loader_on(path, **({"transform": None, "shuffle": GlobalShuffle(), "batch_size": 16} | options))


def test_a_local_shuffle_reads_blocks_in_random_order_and_resumes_anywhere(in_place: Path) -> None:
    shuffle = LocalShuffle(79)
    with encoded(in_place, shuffle=shuffle) as loader:
        blocks, batches = loader.dataset.blocks, iter(loader)
        first = epoch_of(batches, 3)
        state = json.loads(json.dumps(loader.state_dict()))
        rest = epoch_of(batches)
        assert_exactly_once(loader, first + rest)
    with encoded(in_place, shuffle=shuffle, workers=1) as resumed:
        resumed.load_state_dict(state)
        assert_same(epoch_of(resumed), rest)

    assert len(blocks) > 3 * len(open_dataset(in_place).manifest.shards)
    assert np.mean([len(set(labels.tolist())) for _, labels, _ in first[1:]]) > 7


def test_the_warning_names_a_window_that_mixes_the_classes(in_place: Path) -> None:
    with pytest.warns(SortedByClass, match=r"LocalShuffle of at least \d+ records, or convert it to shards"):
        encoded(in_place, shuffle=LocalShuffle(3), batch_size=8).close()


def measured(large_folder: Path, parts: int) -> dict[str, Any]:
    """What the program measured of so many parts, in a process of its own."""
    environment = os.environ | {"XDG_CACHE_HOME": str(large_folder / "cache")}
    program = [sys.executable, billion_records.__file__, str(large_folder / f"{parts}"), str(parts)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=600, env=environment)
    assert not done.returncode, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture
def large_folder(tmp_path: Path) -> Iterator[Path]:
    """A large_folder that is removed at once: copied, its files have 60 GB."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.mark.torture
def test_memory_does_not_grow_with_the_records(large_folder: Path) -> None:
    few, many = measured(large_folder, 8), measured(large_folder, 64)

    print(json.dumps([few, many], indent=1))
    assert many["records"] == 1 << 30
    assert many["peak_kb"] < 1_000_000
    grown = 1024 * (many["peak_kb"] - few["peak_kb"]) / (many["records"] - few["records"])
    assert grown < 0.2, "bytes per record"
