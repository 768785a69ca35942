"""Fixtures of the tests that damage a dataset, and a proxy before a server of object storage."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.faulty_proxy import Proxy, faulty_proxy
from support.object_server import as_endpoint


@pytest.fixture
def dataset(intact: Path, tmp_path: Path) -> Path:
    """A copy of the dataset that the test's file calls ``intact``."""
    return Path(shutil.copytree(intact, tmp_path / "dataset"))


@pytest.fixture
def proxy(server: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy of the server, which is the endpoint of S3 in this test."""
    with faulty_proxy(server) as running:
        as_endpoint(running.url, monkeypatch)
        yield running
