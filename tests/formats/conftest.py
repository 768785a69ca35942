"""Fixtures of the tests that damage a dataset, and a proxy before a server of object storage."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty_proxy import Proxy, faulty_proxy


@pytest.fixture
def dataset(intact: Path, tmp_path: Path) -> Path:
    """A copy of the dataset that the test's file calls ``intact``."""
    return Path(shutil.copytree(intact, tmp_path / "dataset"))


@pytest.fixture
def proxy(server: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy of the server, which is the endpoint of S3 in this test."""
    with faulty_proxy(server) as running:
        for name in ("AWS_ENDPOINT", "AWS_ENDPOINT_URL_S3", "AWS_ALLOW_HTTP"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("AWS_ENDPOINT_URL", running.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI")
        yield running
