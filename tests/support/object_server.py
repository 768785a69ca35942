"""A real server of S3, as a process.

``S3_SERVER`` in the environment names another one, as a command with ``{port}``, and ``{folder}`` for a new
folder if it needs one: ``S3_SERVER='moto_server -p {port}'``.
"""

import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import quote, unquote

import pytest

from support.faulty_proxy import Quiet, answered, listening
from support.ports import answers, free_port
from support.waiting import until


@dataclass
class Mirror:
    """The folders in ``root``, and the buckets of the server at this port."""

    root: Path
    server: int
    known: dict[str, tuple[int, int]] = field(default_factory=dict)
    buckets: set[str] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def send_changes(self, bucket: str) -> None:
        """Make the bucket what its folder is now."""
        with self.lock:
            if bucket not in self.buckets and (self.root / bucket).is_dir():
                self.buckets.add(bucket)
                self.ask("PUT", f"/{bucket}")
            found = {self.name(path): path for path in (self.root / bucket).rglob("*") if path.is_file()}
            for name, path in found.items():
                if self.known.get(name) != state(path):
                    self.known[name] = state(path)
                    self.ask("PUT", "/" + quote(name), path.read_bytes())
            for name in [name for name in self.known if name.startswith(f"{bucket}/") and name not in found]:
                del self.known[name]
                self.ask("DELETE", "/" + quote(name))

    def write(self, name: str) -> None:
        """Make the file what the object of this name is now."""
        path = self.root / name
        with self.lock:
            status, body = self.ask("GET", "/" + quote(name))
            if status == 200:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(body)
                self.known[name] = state(path)
            else:
                path.unlink(missing_ok=True)
                self.known.pop(name, None)

    def name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        answer, found = answered(self.server, method, path, signed(), body)
        return answer.status, found


def signed() -> dict[str, str]:
    """Headers for servers that want a signature and do not check it."""
    return {"Authorization": "AWS S3RVER:unchecked", "Date": formatdate(usegmt=True)}


def state(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size


@contextmanager
def mirrored(root: Path, server: int) -> Iterator[int]:
    """Relay requests to the server at this port; the relay's port."""

    class Handler(Relay):
        mirror = Mirror(root, server)

    for folder in [path for path in root.iterdir() if path.is_dir()]:
        Handler.mirror.send_changes(folder.name)  # not in a request, which has a timeout
    with listening(Handler) as port:
        yield port


class Relay(Quiet):
    mirror: Mirror

    def relay(self) -> None:
        name = unquote(self.path.partition("?")[0]).strip("/")
        self.mirror.send_changes(name.partition("/")[0])
        headers = signed() | dict(self.headers)
        answer, found = answered(self.mirror.server, self.command, self.path, headers, self.received())
        length = answer.headers["Content-Length"]
        if self.command in ("PUT", "POST", "DELETE") and "/" in name:
            self.mirror.write(name)
        self.send_response_only(answer.status)
        for key, value in answer.headers.items():
            if key.lower() not in ("connection", "keep-alive", "transfer-encoding", "content-length"):
                self.send_header(key, value)
        self.send_header("Content-Length", str(length if self.command == "HEAD" and length else len(found)))
        self.end_headers()
        self.wfile.write(found)

    def __getattr__(self, name: str) -> Callable[[], None]:
        if name.startswith("do_"):
            return self.relay
        raise AttributeError(name)


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


def as_endpoint(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a server the endpoint of S3 in this test, also for processes that it starts."""
    for name in ("AWS_ENDPOINT", "AWS_ENDPOINT_URL_S3", "AWS_ALLOW_HTTP"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", HIDDEN)
