"""The ZeroMQ socket of senders and receivers."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import zmq

from shardprep.formats.errors import OperationError, UsageError
from shardprep.formats.system.owned import Owned

from .codec import MAX_PARTS

EVENT = struct.Struct("=Hi")
MONITOR = "inproc://monitor"
HANDSHAKE_TIMEOUT_MS = 5_000
HEARTBEAT_INTERVAL_MS = 5_000
HEARTBEAT_TIMEOUT_MS = 15_000
BACKLOG = 64
MAX_PORT = 65_535
PROBE_TIMEOUT_S = 1.0

# For both protocols, that of FrameReceiver and that of RemoteSource.
POLL_INTERVAL_S = (
    0.5  # after which a waiting thread checks again, so that a lost event or Ctrl-C cannot block it
)
LINGER_MS = 500  # for the last messages of a socket that is closed
SPARE_MESSAGES = 16  # besides batches, that a sender has in flight: so its connection is always read
MAX_TEXT_CHARACTERS = 4000  # of an error or a reason, so that a header holds it however it is escaped


class Message(NamedTuple):
    """A received message: the address of its peer (empty where there is only one), and the buffers."""

    peer: bytes
    parts: list[zmq.Frame]

    @property
    def connection(self) -> int:
        """The number that :meth:`FrameSocket.events` returns for the connection, -1 where it is not known."""
        try:
            return int(self.parts[0].get(zmq.SRCFD))
        except zmq.ZMQError:
            return -1

    @property
    def user(self) -> str:
        """The user that the socket's :class:`Security` admitted the peer as, "" without one."""
        try:
            return str(self.parts[0].get("User-Id"))
        except zmq.ZMQError:
            return ""


class Security(Protocol):
    """The authentication of the peers of one socket."""

    def secure(self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes]) -> None:
        """Set a socket up before it binds or connects."""

    def close(self) -> bool:
        """Close what was opened in the context. Called after the socket is closed, even without ``secure``.

        Return True where something stays open, on which terminating the context would block for ever.
        """


def check_form(endpoint: str) -> None:
    """Raise UsageError where ``endpoint`` is not a valid endpoint of a FrameSocket."""
    if not endpoint.startswith(("tcp://", "ipc://")):
        raise UsageError(f"an endpoint is tcp://ADDRESS:PORT or ipc://PATH, not {endpoint!r}")
    port = endpoint.rpartition(":")[2]
    if endpoint.startswith("tcp://") and port.isdecimal() and int(port) > MAX_PORT:
        raise UsageError(f"{endpoint}: a port is at most {MAX_PORT}")


def _check_free(endpoint: str) -> None:
    """Raise OperationError where a process listens at ``ipc://``; libzmq would replace its socket."""
    kind, _, path = endpoint.partition("://")
    if kind != "ipc":
        return
    with socket.socket(socket.AF_UNIX) as probe, suppress(OSError):  # a path that is too long, for example
        probe.settimeout(PROBE_TIMEOUT_S)
        if probe.connect_ex(path) == 0:
            raise OperationError(
                f"{endpoint}: another process listens there already; choose another endpoint"
            )


class FrameSocket(Owned):
    """A socket in a context of its own, with a monitor for the ``watched`` events. Not thread-safe."""

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
            zmq.HANDSHAKE_IVL: HANDSHAKE_TIMEOUT_MS,
            zmq.HEARTBEAT_IVL: HEARTBEAT_INTERVAL_MS,
            zmq.HEARTBEAT_TIMEOUT: HEARTBEAT_TIMEOUT_MS,
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
        self._monitor.setsockopt(zmq.RCVHWM, 0)  # a monitor that is not read must not block its socket
        self._monitor.connect(MONITOR)

    def wait(self, seconds: float, *, other: Any = None) -> bool:
        """Wait until a message or an event arrives, or ``other`` can be read; return whether one did."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        if other is not None:
            poller.register(other, zmq.POLLIN)
        return bool(poller.poll(max(0, int(seconds * 1000))))

    def receive(self) -> Message | None:
        """Return the next message, None where there is none. Buffers far above MAX_PARTS are dropped."""
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
        """Send a small message; return False where there is no peer. Dropped where the peer does not read."""
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
        """Send without copying large parts; the tracker is done when their memory may be used again.

        Raises zmq.Again where there is no peer.
        """
        *before, last = parts  # send_multipart would track only the last one
        more = zmq.NOBLOCK | zmq.SNDMORE
        sent = [self._socket.send(part, more, copy=False, track=True) for part in before]
        return zmq.MessageTracker(*sent, self._socket.send(last, zmq.NOBLOCK, copy=False, track=True))

    def events(self) -> Iterator[tuple[int, int]]:
        """Yield the watched events since the last call, each with its connection's number or its error."""
        while self._monitor.poll(0):
            event, *_ = self._monitor.recv_multipart()
            kind, value = EVENT.unpack(event)
            yield kind, value

    def close(self, *, linger_ms: int = 0) -> None:
        """Close everything. Messages in the queue are still sent, for at most ``linger_ms``. Idempotent."""
        if self.made_here and not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=linger_ms)
            if not (self._security and self._security.close()):
                self._context.term()
