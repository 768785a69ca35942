"""Fixtures of the tests that damage a dataset."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def dataset(intact: Path, tmp_path: Path) -> Path:
    """A copy of the dataset that the test's file calls ``intact``."""
    return Path(shutil.copytree(intact, tmp_path / "dataset"))


@pytest.fixture(scope="module")
def buckets(bucket: Path) -> Path:
    """The folder of the server's buckets."""
    return bucket.parent
