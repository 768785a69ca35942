"""A relay before a server of S3 that keeps the server's buckets and a folder the same.

The tests look into the folder of a bucket, and change files there. The relay sends such changes before each
request, and writes what a request changed into the folder.
"""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, unquote

OF_CONNECTION = ("connection", "keep-alive", "transfer-encoding", "content-length")


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
        connection = http.client.HTTPConnection("127.0.0.1", self.server, timeout=30)
        with closing(connection):
            connection.request(method, path, body=body, headers=signed())
            answer = connection.getresponse()
            return answer.status, answer.read()


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
    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listener.daemon_threads = True
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield listener.server_address[1]
    finally:
        listener.shutdown()
        listener.server_close()
        thread.join()


class Relay(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    mirror: Mirror

    def handle(self) -> None:
        with suppress(ConnectionError):  # of a client that was killed
            super().handle()

    def log_message(self, *_: object) -> None:
        pass

    def relay(self) -> None:
        name = unquote(self.path.partition("?")[0]).strip("/")
        self.mirror.send_changes(name.partition("/")[0])
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        upstream = http.client.HTTPConnection("127.0.0.1", self.mirror.server, timeout=30)
        upstream.request(self.command, self.path, body=body, headers=signed() | dict(self.headers))
        answer = upstream.getresponse()
        found, length = answer.read(), answer.headers["Content-Length"]
        upstream.close()
        if self.command in ("PUT", "POST", "DELETE") and "/" in name:
            self.mirror.write(name)
        self.send_response_only(answer.status)
        for key, value in answer.headers.items():
            if key.lower() not in OF_CONNECTION:
                self.send_header(key, value)
        self.send_header("Content-Length", str(length if self.command == "HEAD" and length else len(found)))
        self.end_headers()
        self.wfile.write(found)

    def __getattr__(self, name: str) -> Callable[[], None]:
        if name.startswith("do_"):
            return self.relay
        raise AttributeError(name)
