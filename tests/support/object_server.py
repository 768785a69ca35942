"""A real server of S3, as a process."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from waiting import until

HIDDEN = "wJalrXUtnFEMI"  # the secret key, which nothing may show


@contextmanager
def object_server(root: Path) -> Iterator[int]:
    """Serve the folders in ``root`` as buckets of S3; the port."""
    port = free_port()
    command = [sys.executable, "-m", "localbucket", str(root), "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            until(lambda: answers(port) or server.poll() is not None)
            assert server.poll() is None, "the server did not start"
            yield port
        finally:
            server.terminate()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def as_endpoint(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a server the endpoint of S3 in this test, also for processes that it starts."""
    for name in ("AWS_ENDPOINT", "AWS_ENDPOINT_URL_S3", "AWS_ALLOW_HTTP"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", HIDDEN)
