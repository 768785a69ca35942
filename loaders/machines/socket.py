"""The ZeroMQ socket of senders and receivers, used by one thread at a time and closed by any."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import stat
import struct
import sys
import termios
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import zmq

from shardprep.formats.errors import OperationError, UsageError
from shardprep.formats.runtime.owners import Owner
from shardprep.formats.runtime.progress import check_flags, is_sequence
from shardprep.loaders.machines.codec import PIECE

EVENT = struct.Struct("=Hi")
EVENTS = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
)
TCP_BYTES_RECEIVED = 128  # where Linux's struct tcp_info has tcpi_bytes_received
CHECK_INTERVAL_S = 0.7
UNREAD_CHECKS = 3  # after that many, in some two seconds, a connection counts as unread
MAX_BUFFER_BYTES = PIECE + 64  # encryption adds 33 bytes
MONITOR = "inproc://monitor"
DOMAIN = b"prep"  # of ZeroMQ's authentication
HANDSHAKE_TIMEOUT_MS = 5_000
VANISHED_S = 15  # after which a connection to a machine that does not answer is closed
PROBE_INTERVAL_S = 5
BACKLOG = 64
ENDPOINT_FORM = re.compile(r"ipc://.*|tcp://(?:.+;)?(?:[^][:;/]+|\[[^][]+\]):(\*|[0-9]+)", re.DOTALL)
MAX_PORT = 65_535
PROBE_TIMEOUT_S = 1.0

POLL_INTERVAL_S = 0.5  # a waiting thread checks that often, so that a lost event or Ctrl-C cannot block it
LINGER_MS = 500  # to send the last messages of a closed socket
MAX_NAME = 256  # characters
MAX_TEXT_CHARACTERS = 4000  # of an error or a reason: it fits into a header, however it is escaped


class Message(NamedTuple):
    """A received message: the address of its peer (empty if there is only one), and the buffers."""

    peer: bytes
    parts: list[zmq.Frame]

    @property
    def connection(self) -> int:
        """The connection's number in :meth:`FrameSocket.events`."""
        return int(self.parts[0].get(zmq.SRCFD))

    @property
    def user(self) -> str:
        """The peer's authenticated user, "" without authentication."""
        with suppress(zmq.ZMQError):
            return str(self.parts[0].get("User-Id"))
        return ""


Secure = Callable[["zmq.Context[zmq.Socket[bytes]]", "zmq.Socket[bytes]"], None]
"""Sets up authentication before a socket binds or connects. It may make other sockets."""


def endpoints_of(endpoint: str | Sequence[str]) -> tuple[str, ...]:
    """Return one endpoint or several as a tuple. Raises UsageError if there is none."""
    endpoints = tuple(endpoint) if is_sequence(endpoint) else (endpoint,)
    if not endpoints:
        raise UsageError("give at least one endpoint")
    return endpoints


def check_endpoint_form(endpoint: object) -> None:
    """Raise UsageError unless ``endpoint`` is valid for a FrameSocket."""
    if not isinstance(endpoint, str) or not (form := ENDPOINT_FORM.fullmatch(endpoint)):
        raise UsageError(
            f"an endpoint is tcp://ADDRESS:PORT, with an IPv6 address in [ ], or ipc://PATH, not {endpoint!r}"
        )
    if (form[1] or "*") != "*" and int(form[1]) > MAX_PORT:
        raise UsageError(f"{endpoint}: a port is at most {MAX_PORT}")


def _check_free(endpoint: str) -> None:
    """Raise OperationError if a file or a listener is at this ``ipc://PATH``: libzmq would replace it."""
    kind, _, path = endpoint.partition("://")
    if kind != "ipc":
        return
    with socket.socket(socket.AF_UNIX) as probe, suppress(OSError):  # for example, the path is too long
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise OperationError(f"{endpoint}: something is there that is not a socket; choose another path")
        probe.settimeout(PROBE_TIMEOUT_S)
        if probe.connect_ex(path) == 0:
            raise OperationError(
                f"{endpoint}: another process listens there already; choose another endpoint"
            )


class FrameSocket(Owner):
    """A socket with a context and a monitor of its own: a ROUTER if it has several ``peers``, else a DEALER.

    libzmq's queues are unbounded, as bounded ones are unsafe (see the options): leases bound what peers
    send. Not thread-safe.
    """

    def __init__(
        self,
        endpoint: str | Sequence[str],
        *,
        bind: bool,
        peers: bool,
        options: dict[int, int],
        secure: Secure | None = None,
    ) -> None:
        check_flags(bind=bind)
        endpoints = endpoints_of(endpoint)
        for each in endpoints:
            check_endpoint_form(each)
        self.binds = bind
        self._has_peers = peers
        self._events: deque[tuple[int, int]] = deque()
        self._connections: dict[int, tuple[int, int]] = {}  # bytes read, and checks, by descriptor
        self._next_check = 0.0
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER if peers else zmq.DEALER)
        self._socket.monitor(MONITOR, EVENTS)
        self._monitor = self._context.socket(zmq.PAIR)
        self._monitor.setsockopt(zmq.RCVHWM, 0)  # an unread monitor must not block its socket
        self._monitor.connect(MONITOR)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        common: dict[int, int | bytes] = {
            zmq.LINGER: 0,
            zmq.BACKLOG: BACKLOG,
            zmq.HANDSHAKE_IVL: HANDSHAKE_TIMEOUT_MS,
            zmq.CONNECT_TIMEOUT: HANDSHAKE_TIMEOUT_MS,  # where nothing answers, TCP's own pauses grow to a minute
            # If a peer resets its connection while a bounded queue is full, libzmq's heartbeat (libzmq #4364)
            # or a PING from the peer aborts the process. So queues are unbounded, and TCP does the probing.
            zmq.RCVHWM: 0,
            zmq.TCP_KEEPALIVE: 1,
            zmq.TCP_KEEPALIVE_IDLE: PROBE_INTERVAL_S,
            zmq.TCP_KEEPALIVE_INTVL: PROBE_INTERVAL_S,
            zmq.TCP_KEEPALIVE_CNT: VANISHED_S // PROBE_INTERVAL_S - 1,
            zmq.TCP_MAXRT: VANISHED_S * 1000,
            zmq.IMMEDIATE: 0,  # with 1, losing a connection while a message is read aborts the process
            zmq.ZAP_DOMAIN: DOMAIN,  # refuses ZMTP 1 and 2, which may abort the process when it closes
        }
        if peers:
            common[zmq.ROUTER_MANDATORY] = 1
        try:
            if secure:
                secure(self._context, self._socket)
            for option, value in (common | options).items():
                self._socket.setsockopt(option, value)
            self.endpoints = tuple(map(self._open, endpoints))
            self.endpoint = self.endpoints[0]
        except BaseException:
            self.close()
            raise

    def _open(self, endpoint: str) -> str:
        """Bind or connect; return the endpoint with its real port."""
        self._socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        try:
            if self.binds:
                _check_free(endpoint)
                self._socket.bind(endpoint)
            else:
                self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise OperationError(
                f"{endpoint}: {zmq.strerror(error.errno or 0)}; choose another endpoint"
            ) from error
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def wait(self, seconds: float) -> None:
        """Wait until a message or an event arrives."""
        if not self._events:
            self._poller.poll(max(0, int(seconds * 1000)))

    def receive(self) -> Message | None:
        """Return the next message, None if there is none."""
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            self._end_unread_connections()
            return None
        return Message(frames.pop(0).bytes if self._has_peers else b"", frames)

    def _end_unread_connections(self) -> None:
        """End connections that libzmq 4.3 no longer reads, which it does after damage to an encrypted one."""
        if (now := time.monotonic()) < self._next_check:
            return
        self._next_check = now + CHECK_INTERVAL_S
        self._read_monitor()
        for number, (before, checks) in self._connections.items():
            # OSError: not TCP, or closed, whose event follows
            with suppress(OSError), socket.fromfd(number, socket.AF_INET, socket.SOCK_STREAM) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_BYTES_RECEIVED + 8)
                (received,) = struct.unpack_from("=Q", info, TCP_BYTES_RECEIVED)
                unread = int.from_bytes(fcntl.ioctl(number, termios.FIONREAD, bytes(4)), sys.byteorder)
                checks = checks + 1 if unread and received - unread == before else 0
                self._connections[number] = received - unread, checks
                if checks == UNREAD_CHECKS:
                    connection.shutdown(socket.SHUT_RDWR)

    def send(self, parts: Sequence[Any], *, peer: bytes = b"") -> bool:
        """Send a small message; return False if there is no peer. Dropped if the peer does not read.

        A ROUTER that connects gives the same address to each of its successive peers.
        """
        if self._has_peers and not self.binds:
            self._read_monitor()
            if not self._connections:
                return False
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
        """Send without copying large parts; the tracker is done when their memory may be reused.

        Raises zmq.Again if there is no peer.
        """
        *before, last = parts  # send_multipart would track only the last one
        more = zmq.NOBLOCK | zmq.SNDMORE
        sent = [self._socket.send(part, more, copy=False, track=True) for part in before]
        return zmq.MessageTracker(*sent, self._socket.send(last, zmq.NOBLOCK, copy=False, track=True))

    def events(self) -> Iterator[tuple[int, int]]:
        """Yield the EVENTS since the last call, each with its connection number or error."""
        self._read_monitor()
        while self._events:
            yield self._events.popleft()

    def _read_monitor(self) -> None:
        while self._monitor.poll(0):
            event, *_ = self._monitor.recv_multipart()
            kind, value = EVENT.unpack(event)
            if kind in (zmq.EVENT_ACCEPTED, zmq.EVENT_CONNECTED):
                self._connections[value] = 0, 0
            elif kind == zmq.EVENT_DISCONNECTED:
                self._connections.pop(value, None)
            self._events.append((kind, value))

    def close(self, *, linger_ms: int = 0) -> None:
        """Close everything, after sending queued messages for at most ``linger_ms``. Idempotent."""
        if not self.was_made_here or self._socket.closed:
            return
        self._read_monitor()
        copies = {}
        for number in self._connections:
            with suppress(OSError):  # closed, whose event follows
                copies[number] = socket.fromfd(number, socket.AF_INET, socket.SOCK_STREAM)
        self._read_monitor()  # tells if a number was given to another file before it was copied
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=linger_ms)
        self._context.term()
        for number, copy in copies.items():
            with suppress(OSError), copy:
                if number in self._connections:
                    copy.shutdown(socket.SHUT_RDWR)  # a fork of this process may hold the connection, too
