"""A server of object storage with an empty bucket, and datasets to publish."""

from pathlib import Path

import pytest

from support.datasets import converted


@pytest.fixture(scope="module")
def buckets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("server")
    (folder / "bucket").mkdir()
    return folder


@pytest.fixture
def bucket(buckets: Path, tmp_path: Path) -> Path:
    """The folder of the test in the bucket; its URL is s3://bucket/ and its name."""
    return buckets / "bucket" / tmp_path.name


@pytest.fixture
def url(bucket: Path) -> str:
    return f"s3://bucket/{bucket.name}"


@pytest.fixture(scope="module")
def local(archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two splits."""
    folder = tmp_path_factory.mktemp("local") / "shards"
    for split in ("train", "val"):
        converted(archives, folder / split, split=split, container="hdf5")
    return folder
