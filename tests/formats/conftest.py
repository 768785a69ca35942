"""Fixtures of the tests that damage a dataset, and of those with buckets of published ones."""

import shutil
from pathlib import Path

import pytest

from support.column_datasets import write_columns
from support.datasets import converted


@pytest.fixture
def dataset(intact: Path, tmp_path: Path) -> Path:
    """A copy of the dataset that the test's file calls ``intact``."""
    return Path(shutil.copytree(intact, tmp_path / "dataset"))


@pytest.fixture(scope="session")
def bucket(archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that is a bucket: splits in HDF5, a split in LMDB, and one with columns."""
    folder = tmp_path_factory.mktemp("server") / "bucket"
    for split in ("train", "val", "test"):
        converted(archives, folder / "shards" / split, split=split, container="hdf5")
    converted(archives, folder / "lmdb", shard_size=200_000)
    write_columns(folder / "columns")
    return folder


@pytest.fixture(scope="module")
def buckets(bucket: Path) -> Path:
    return bucket.parent
