"""A server of S3 that has a dataset of small shards, and a proxy before it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.faulty_proxy import Proxy, faulty_proxy
from support.object_server import as_endpoint, object_server


@pytest.fixture(scope="module")
def server(lmdb_shards: Path) -> Iterator[int]:
    """The port of a server of S3."""
    with object_server(lmdb_shards.parent.parent) as port:
        yield port


@pytest.fixture
def proxy(server: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy of the server, which is the endpoint of S3 in this test."""
    with faulty_proxy(server) as running:
        as_endpoint(running.url, monkeypatch)
        yield running


@pytest.fixture(scope="module")
def bucket_url(lmdb_shards: Path) -> str:
    """The URL of the dataset."""
    return f"s3://{lmdb_shards.parent.name}/{lmdb_shards.name}"
