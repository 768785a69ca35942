"""A bucket with a dataset of small shards and one with columns, and a proxy before its server."""

from pathlib import Path

import pytest

from support.column_datasets import write_columns
from support.datasets import converted


@pytest.fixture(scope="module")
def bucket(archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that is a bucket."""
    folder = tmp_path_factory.mktemp("server") / "bucket"
    converted(archives, folder / "splits" / "train", container="hdf5", shard_size=40_000)
    write_columns(folder / "columns")
    return folder
