"""Buckets with published datasets."""

from pathlib import Path

import pytest

from support.column_datasets import write_columns
from support.datasets import converted


@pytest.fixture(scope="module")
def bucket(archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that is a bucket: splits in HDF5, a split in LMDB, and one with columns."""
    folder = tmp_path_factory.mktemp("server") / "bucket"
    for split in ("train", "val", "test"):
        converted(archives, folder / "shards" / split, split=split, container="hdf5")
    converted(archives, folder / "lmdb", shard_size=200_000)
    write_columns(folder / "columns")
    return folder
