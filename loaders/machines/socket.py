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
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import zmq

from shardprep.formats.errors import OperationError, UsageError
from shardprep.formats.runtime.owned import Owned
from shardprep.loaders.machines.codec import MAX_PARTS, PIECE

EVENT = struct.Struct("=Hi")
NO_LINGER = struct.pack("ii", 1, 0)  # closing a connection resets it
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
LOOK_INTERVAL_S = 0.1
UNREAD_S = 2.0  # a busy machine may leave a connection unread for that long
UNREAD_LOOKS = 3  # at least that many in that time, as the process may have been stopped
MAX_BUFFER_BYTES = PIECE + 64  # encryption adds 33 bytes
UNREAD_BYTES = 16 << 20  # that the kernel and libzmq may hold besides a message
MONITOR = "inproc://monitor"
DOMAIN = b"prep"  # of ZeroMQ's authentication
HANDSHAKE_TIMEOUT_MS = 5_000
VANISHED_S = 15  # after which a connection to a machine that does not answer is closed
PROBE_INTERVAL_S = 5
BACKLOG = 64
TRACKED_EVERY = 16  # messages
FORM = re.compile(r"ipc://.*|tcp://(?:.+;)?(?:[^][:;/]+|\[[^][]+\]):(\*|[0-9]+)", re.DOTALL)
MAX_PORT = 65_535
PROBE_TIMEOUT_S = 1.0

POLL_INTERVAL_S = 0.5  # a waiting thread checks that often, so that a lost event or Ctrl-C cannot block it
LINGER_MS = 500  # to send the last messages of a closed socket
SPARE_MESSAGES = 16  # of a sender in flight, besides batches
FETCHED_AT_ONCE = 10_000  # messages
MAX_ENDED = 1000  # disconnected peers whose messages may still arrive
MAX_EVENTS = 10_000  # unread
MAX_NAME = 256  # characters
MAX_TEXT_CHARACTERS = 4000  # of an error or a reason: it fits into a header, however it is escaped


class Message(NamedTuple):
    """A received message: the address of its peer (empty if there is only one), and the buffers."""

    peer: bytes
    parts: list[zmq.Frame]

    @property
    def connection(self) -> int:
        """The connection's number in :meth:`FrameSocket.events`, -1 if it is not known."""
        with suppress(zmq.ZMQError):
            return int(self.parts[0].get(zmq.SRCFD))
        return -1

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
    endpoints = tuple(endpoint) if isinstance(endpoint, list | tuple) else (endpoint,)
    if not endpoints:
        raise UsageError("give at least one endpoint")
    return endpoints


def check_form(endpoint: object) -> None:
    """Raise UsageError unless ``endpoint`` is valid for a FrameSocket."""
    if not isinstance(endpoint, str) or not (form := FORM.fullmatch(endpoint)):
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


def _bytes_received(number: int) -> tuple[int, int]:
    """Return the number of bytes received over a connection and still unread; 0, 0 if it is not known."""
    try:
        with _same_connection(number) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_BYTES_RECEIVED + 8)
            unread = fcntl.ioctl(connection, termios.FIONREAD, bytes(4))
        return struct.unpack_from("=Q", info, TCP_BYTES_RECEIVED)[0], int.from_bytes(unread, sys.byteorder)
    except (OSError, AttributeError, struct.error):  # not TCP, not Linux, or an old Linux
        return 0, 0


def _same_connection(number: int) -> socket.socket:
    """Duplicate a descriptor, so that it stays the same file. Raises OSError if it is not a socket."""
    copy = os.dup(number)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


@dataclass
class Connection:
    """The bytes from a peer, as of the last look.

    ``received`` bytes had arrived when its last message was seen. libzmq has read ``read`` bytes, and no more
    in ``looks`` looks since the time ``since``. ``is_heard`` is set when another message arrives.
    """

    received: int = 0
    read: int = 0
    looks: int = 0
    since: float = 0.0
    is_heard: bool = False


_sockets: weakref.WeakSet[FrameSocket] = weakref.WeakSet()


def _close_inherited() -> None:
    """Close the connections in a forked copy, which would keep them open if this process is killed."""
    for each in _sockets:
        for number in each.connections:
            with suppress(OSError), _same_connection(number) as connection:
                if each.owns(connection):
                    os.close(number)


os.register_at_fork(after_in_child=_close_inherited)


class FrameSocket(Owned):
    """A socket with a context and a monitor of its own: a ROUTER with ``most_waiting``, else a DEALER.

    libzmq's queues are unbounded, as bounded ones are unsafe (see the options). The user of a ROUTER calls
    :meth:`fetch` several times a second, to disconnect peers with more than ``most_waiting`` unreceived
    messages. A message has at most ``most_bytes``. Not thread-safe.
    """

    def __init__(
        self,
        endpoint: str | Sequence[str],
        *,
        bind: bool,
        options: dict[int, int],
        most_bytes: int,
        secure: Secure | None = None,
        most_waiting: int = 0,
    ) -> None:
        endpoints = endpoints_of(endpoint)
        for each in endpoints:
            check_form(each)
        self.binds = bind
        self.dropped = 0  # messages
        self._most_waiting = most_waiting
        self._waiting: deque[Message] = deque()
        self._waiting_of: Counter[bytes] = Counter()
        self._ended: deque[bytes] = deque(maxlen=MAX_ENDED)
        self._sent = 0
        self._events: deque[tuple[int, int]] = deque(maxlen=MAX_EVENTS)
        self.connections: dict[int, Connection] = {}  # by descriptor number
        self._next_look = 0.0
        self._most_bytes = most_bytes + UNREAD_BYTES
        self._has_peers = most_waiting > 0
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER if self._has_peers else zmq.DEALER)
        self._socket.monitor(MONITOR, EVENTS)
        self._monitor = self._context.socket(zmq.PAIR)
        self._monitor.setsockopt(zmq.RCVHWM, 0)  # an unread monitor must not block its socket
        self._monitor.connect(MONITOR)
        common: dict[int, int | bytes] = {
            zmq.LINGER: 0,
            zmq.BACKLOG: BACKLOG,
            zmq.HANDSHAKE_IVL: HANDSHAKE_TIMEOUT_MS,
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
        try:
            if secure:
                secure(self._context, self._socket)
            if self._has_peers:
                common[zmq.ROUTER_MANDATORY] = 1
            for option, value in (common | options).items():
                self._socket.setsockopt(option, value)
            self.endpoints = tuple(map(self._open, endpoints))
            self.endpoint = self.endpoints[0]
        except BaseException:
            self.close()
            raise
        _sockets.add(self)

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

    def wait(self, seconds: float, *, other: Any = None) -> bool:
        """Wait until a message or event arrives, or ``other`` is readable; return whether that happened."""
        if self._waiting or self._events:
            return True
        poller = zmq.Poller()
        for each in (self._socket, self._monitor, *([] if other is None else [other])):
            poller.register(each, zmq.POLLIN)
        ready = dict(poller.poll(max(0, int(seconds * 1000))))
        if ready.pop(self._monitor, None):
            self._look_at_monitor()
        return bool(ready or self._events)

    def receive(self) -> Message | None:
        """Return the next message, None if there is none. Buffers far beyond MAX_PARTS are dropped."""
        if not self._has_peers:
            if (message := self._next()) is None:
                self._reset_broken()
            return message
        if not self._waiting:
            self.fetch()
        if not self._waiting:
            return None
        message = self._waiting.popleft()
        self._waiting_of[message.peer] -= 1
        if not self._waiting_of[message.peer]:
            del self._waiting_of[message.peer]
        return message

    def fetch(self) -> None:
        """Drain libzmq's queues, and disconnect peers that have sent too many messages."""
        self._reset_broken()
        for _ in range(FETCHED_AT_ONCE):
            if (message := self._next()) is None:
                return
            if message.peer in self._ended:
                self.dropped += 1
            elif self._waiting_of[message.peer] == self._most_waiting:
                self.dropped += 1 + self._waiting_of.pop(message.peer)
                self._waiting = deque(each for each in self._waiting if each.peer != message.peer)
                self._ended.append(message.peer)
                self._reset(message.connection)
            else:
                self._waiting_of[message.peer] += 1
                self._waiting.append(message)

    def _reset(self, number: int) -> None:
        """Reset a connection, which libzmq has no call for."""
        with suppress(OSError), _same_connection(number) as connection:
            if self.owns(connection):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
                connection.shutdown(socket.SHUT_RDWR)

    def owns(self, connection: socket.socket) -> bool:
        """Whether a connection belongs to this socket; its number may belong to another file by now."""
        ends = connection.getsockname(), connection.getpeername()
        places = tuple(f":{end[1]}" if isinstance(end, tuple) else f"//{end}" for end in ends)
        return any(own.endswith(places) for own in self.endpoints)

    def _reset_broken(self) -> None:
        """Reset connections whose message exceeds the limit without an end, and connections left unread.

        After a message that it cannot decrypt, libzmq 4.3 keeps the connection but never reads it again.
        Needs Linux.
        """
        if (now := time.monotonic()) < self._next_look:
            return
        self._next_look = now + LOOK_INTERVAL_S
        self._look_at_monitor()
        for number, connection in self.connections.items():
            received, unread = _bytes_received(number)
            connection.looks += 1
            if not unread or received - unread != connection.read:
                connection.read, connection.looks, connection.since = received - unread, 0, now
            if connection.is_heard:
                connection.received, connection.is_heard = received, False
            is_stuck = connection.looks >= UNREAD_LOOKS and now > connection.since + UNREAD_S
            if is_stuck or received > connection.received + self._most_bytes:
                self._reset(number)

    def _next(self) -> Message | None:
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
        message = Message(peer, frames)
        if connection := self.connections.get(message.connection):
            connection.is_heard = True
        return message

    def send(self, parts: Sequence[Any], *, peer: bytes = b"") -> bool:
        """Send a small message; return False if there is no peer. Dropped if the peer does not read.

        A ROUTER that connects gives the same address to each of its successive peers.
        """
        if self._has_peers and not self.binds:
            self._look_at_monitor()
            if not self.connections:
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

        Small parts are copied, and done at once, except in every TRACKED_EVERY-th message: this bounds the
        messages queued for a peer that does not read. Raises zmq.Again if there is no peer.
        """
        *before, last = parts  # send_multipart would track only the last one
        more = zmq.NOBLOCK | zmq.SNDMORE
        sent = [self._socket.send(part, more, copy=False, track=True) for part in before]
        self._sent += 1
        if self._sent % TRACKED_EVERY == 0:
            last = zmq.Frame(last, track=True, copy=False, copy_threshold=0)
        return zmq.MessageTracker(*sent, self._socket.send(last, zmq.NOBLOCK, copy=False, track=True))

    def events(self) -> Iterator[tuple[int, int]]:
        """Yield the EVENTS since the last call, each with its connection number or error."""
        self._look_at_monitor()
        while self._events:
            yield self._events.popleft()

    def _look_at_monitor(self) -> None:
        while self._monitor.poll(0):
            event, *_ = self._monitor.recv_multipart()
            kind, value = EVENT.unpack(event)
            if kind in (zmq.EVENT_ACCEPTED, zmq.EVENT_CONNECTED):
                self.connections[value] = Connection()
                if not self.binds:
                    self._ended.clear()
            elif kind == zmq.EVENT_DISCONNECTED:
                self.connections.pop(value, None)
            self._events.append((kind, value))

    def close(self, *, linger_ms: int = 0) -> None:
        """Close everything, after sending queued messages for at most ``linger_ms``. Idempotent."""
        if self.made_here and not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=linger_ms)
            self._context.term()
