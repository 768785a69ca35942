"""Fixtures of the tests that damage a dataset, and a server of object storage with a proxy before it."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.faulty_proxy import Proxy, faulty_proxy
from support.object_server import as_endpoint, object_server


@pytest.fixture
def dataset(intact: Path, tmp_path: Path) -> Path:
    """A copy of the dataset that the test's file calls ``intact``."""
    return Path(shutil.copytree(intact, tmp_path / "dataset"))


@pytest.fixture(scope="module")
def buckets(bucket: Path) -> Path:
    """The folder of the server's buckets."""
    return bucket.parent


@pytest.fixture(scope="module")
def server(buckets: Path) -> Iterator[int]:
    """The port of a server of S3 with the buckets in a folder."""
    with object_server(buckets) as port:
        yield port


@pytest.fixture
def proxy(server: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy of the server, which is the endpoint of S3 in this test."""
    with faulty_proxy(server) as running:
        as_endpoint(running.url, monkeypatch)
        yield running
