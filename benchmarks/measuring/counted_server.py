"""A server of S3 for benchmarks, and a relay before it that counts the bytes it sends."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer

PIECE = 1 << 18


@dataclass
class Counted:
    """The port of the relay, and how many bytes came through it; a few more than those of the files."""

    port: int = 0
    sent: int = 0


@contextmanager
def counted_server(root: Path) -> Iterator[Counted]:
    """Serve the folders in ``root`` as buckets."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "localbucket", str(root), "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            while not _answers(port):
                time.sleep(0.05)
            with _relay(port) as counted:
                yield counted
        finally:
            server.terminate()


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def _relay(server: int) -> Iterator[Counted]:
    counted = Counted()

    class Connection(BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError), socket.create_connection(("127.0.0.1", server)) as upstream:
                threading.Thread(target=_copy, args=(self.request, upstream), daemon=True).start()
                _copy(upstream, self.request, counted)

    class Relay(ThreadingTCPServer):
        daemon_threads = True
        request_queue_size = 128

    with Relay(("127.0.0.1", 0), Connection) as relay:
        counted.port = relay.server_address[1]
        threading.Thread(target=relay.serve_forever, daemon=True).start()
        yield counted
        relay.shutdown()


def _copy(source: socket.socket, target: socket.socket, counted: Counted | None = None) -> None:
    with suppress(OSError):
        while piece := source.recv(PIECE):
            if counted:
                counted.sent += len(piece)
            target.sendall(piece)
        target.shutdown(socket.SHUT_WR)
