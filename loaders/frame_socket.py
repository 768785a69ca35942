"""ZeroMQ's sockets as both ends of the frames' wire use them."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import zmq

from ..formats.errors import OperationError, UsageError
from .frames import MAX_PARTS

EVENT = struct.Struct("=Hi")
MONITOR = "inproc://monitor"
HANDSHAKE_MS = 5_000
HEARTBEAT_MS = 5_000
SILENCE_MS = 15_000
BACKLOG = 64
MAX_PORT = 65_535
PROBE_SECONDS = 1.0


class Message(NamedTuple):
    """What came: the address of the peer it came from (empty where there is only one), and the buffers."""

    peer: bytes
    parts: list[zmq.Frame]

    @property
    def connection(self) -> int:
        """The number that :meth:`FrameSocket.events` gives for its connection, -1 where that is not known."""
        try:
            return int(self.parts[0].get(zmq.SRCFD))
        except zmq.ZMQError:
            return -1

    @property
    def user(self) -> str:
        """As whom the socket's :class:`Security` let its peer in, "" without one."""
        try:
            return str(self.parts[0].get("User-Id"))
        except zmq.ZMQError:
            return ""


class Security(Protocol):
    """What decides who may talk on a socket; each serves one."""

    def secure(self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes]) -> None:
        """Set a socket up before it binds or connects."""

    def close(self) -> None:
        """Let go of whatever is in its context, after the socket has; called even where ``secure`` was not."""


def check_form(endpoint: str) -> None:
    """Raises UsageError for what is no endpoint of a FrameSocket."""
    if not endpoint.startswith(("tcp://", "ipc://")):
        raise UsageError(f"an endpoint is tcp://ADDRESS:PORT or ipc://PATH, not {endpoint!r}")
    port = endpoint.rpartition(":")[2]
    if endpoint.startswith("tcp://") and port.isdecimal() and int(port) > MAX_PORT:
        raise UsageError(f"{endpoint}: a port is at most {MAX_PORT}")


def _check_free(endpoint: str) -> None:
    """libzmq takes the path of an ``ipc://`` endpoint from whoever listens there. Raises OperationError."""
    kind, _, path = endpoint.partition("://")
    if kind != "ipc":
        return
    with socket.socket(socket.AF_UNIX) as probe, suppress(OSError):  # of a path that is too long, say
        probe.settimeout(PROBE_SECONDS)
        if probe.connect_ex(path) == 0:
            raise OperationError(f"{endpoint}: somebody listens there already; choose another endpoint")


class FrameSocket:
    """One socket in a context of its own; it tells of its connections' ``watched`` events. Not thread-safe."""

    def __init__(
        self,
        kind: int,
        endpoint: str,
        *,
        bind: bool,
        options: dict[int, int],
        watched: int = 0,
        security: Security | None = None,
    ) -> None:
        check_form(endpoint)
        self._has_peers = kind == zmq.ROUTER
        self._security = security
        self._context = zmq.Context()
        self._socket = self._context.socket(kind)
        self._watch(watched)
        common = {
            zmq.LINGER: 0,
            zmq.BACKLOG: BACKLOG,
            zmq.HANDSHAKE_IVL: HANDSHAKE_MS,
            zmq.HEARTBEAT_IVL: HEARTBEAT_MS,
            zmq.HEARTBEAT_TIMEOUT: SILENCE_MS,
            zmq.IPV6: int("[" in endpoint),
        }
        try:
            if security:
                security.secure(self._context, self._socket)
            for option, value in (common | options).items():
                self._socket.setsockopt(option, value)
            if bind:
                _check_free(endpoint)
                self._socket.bind(endpoint)
            else:
                self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise OperationError(f"{endpoint}: {error.strerror}; choose another endpoint") from error
        except BaseException:
            self.close()
            raise
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _watch(self, events: int) -> None:
        self._socket.monitor(MONITOR, events)
        self._monitor = self._context.socket(zmq.PAIR)
        self._monitor.setsockopt(zmq.RCVHWM, 0)  # a monitor that is not read must not hold up its socket
        self._monitor.connect(MONITOR)

    def wait(self, seconds: float, *, other: Any = None) -> bool:
        """Until a message or an event came, or ``other`` can be read; whether any did."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        if other is not None:
            poller.register(other, zmq.POLLIN)
        return bool(poller.poll(max(0, int(seconds * 1000))))

    def receive(self) -> Message | None:
        """The next message, None where none is there; of endless buffers only a few too many are kept."""
        try:
            frames = [self._socket.recv(zmq.NOBLOCK, copy=False)]
        except zmq.Again:
            return None
        more = frames[0].more
        while more:
            frame = self._socket.recv(copy=False)
            more = frame.more
            if len(frames) < MAX_PARTS + 3:
                frames.append(frame)
        peer = frames.pop(0).bytes if self._has_peers else b""
        return Message(peer, frames)

    def send(self, parts: Sequence[Any], *, peer: bytes = b"") -> bool:
        """Send a small message, which is dropped where the peer does not read; False where there is no peer."""
        try:
            self._socket.send_multipart([peer, *parts] if self._has_peers else parts, zmq.NOBLOCK)
        except zmq.Again:
            return self._has_peers
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def send_tracked(self, parts: Sequence[Any]) -> zmq.MessageTracker:
        """Send without copying what is large; the tracker tells when the parts' memory is free again.

        zmq.Again where there is no peer.
        """
        *before, last = parts  # send_multipart would track the last of them alone
        more = zmq.NOBLOCK | zmq.SNDMORE
        sent = [self._socket.send(part, more, copy=False, track=True) for part in before]
        return zmq.MessageTracker(*sent, self._socket.send(last, zmq.NOBLOCK, copy=False, track=True))

    def events(self) -> Iterator[tuple[int, int]]:
        """The watched events since the last call, each with the number of its connection where it has one."""
        while self._monitor.poll(0):
            event, *_ = self._monitor.recv_multipart()
            kind, value = EVENT.unpack(event)
            yield kind, value

    def close(self, *, linger_ms: int = 0) -> None:
        """Close everything; what was sent but is not on the wire yet has so long to get there. Idempotent."""
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=linger_ms)
            if self._security:
                self._security.close()
            self._context.term()
