"""A real server of S3, as a process.

``S3_SERVER`` in the environment names another one, as a command with ``{port}``, and ``{folder}`` for a new
folder if it needs one: ``S3_SERVER='moto_server -p {port}'``.
"""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from support.mirrored_server import mirrored
from support.waiting import until

LOCALBUCKET = f"{shlex.quote(sys.executable)} -m localbucket {{folder}} --port {{port}}"
HIDDEN = "wJalrXUtnFEMI"  # the secret key, which nothing may show


@contextmanager
def object_server(root: Path) -> Iterator[int]:
    """Serve the folders in ``root`` as buckets of S3; the port."""
    if other := os.environ.get("S3_SERVER"):
        with TemporaryDirectory() as folder, running(other, folder) as port, mirrored(root, port) as relay:
            yield relay
    else:
        with running(LOCALBUCKET, str(root)) as port:
            yield port


@contextmanager
def running(server: str, folder: str) -> Iterator[int]:
    """Run the command of a server; the port."""
    port = free_port()
    command = [part.format(port=port, folder=folder) for part in shlex.split(server)]
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
