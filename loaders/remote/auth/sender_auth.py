"""The sender's end of the handshake, and the errors of one that fails."""

from __future__ import annotations

import errno
import socket
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import zmq

from shardprep.formats.errors import OperationError

from .endpoints import host_of
from .keys import (
    PRIVATE_SUFFIX,
    PUBLIC_SUFFIX,
    SenderKeys,
    fingerprint,
    load_public,
    load_secret,
)

# ZeroMQ's greeting, the first 64 bytes of a connection
SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
VERSION = b"\x03\x01"
MECHANISM = slice(12, 32)
GREETING_BYTES = 64

HANDSHAKE_TIMEOUT_S = 2.0
MAX_REFUSALS = 3  # in a row, before the reason is determined; one may come from a receiver that is closing
CLOSED_BY_PEER = (errno.EPIPE, errno.ECONNRESET)


def mechanism_of(endpoint: str) -> str:
    """Return the mechanism of the receiver: ``"CURVE"`` with keys, ``"NULL"`` without.

    Returns "" where no ZeroMQ greeting arrives within some seconds. Sends no mechanism: a receiver with
    another one would close the connection, perhaps before its own greeting.
    """
    greeting = b""
    with suppress(OSError), _connected(endpoint) as connection:
        connection.sendall(SIGNATURE + VERSION)
        while len(greeting) < MECHANISM.stop and (received := connection.recv(GREETING_BYTES)):
            greeting += received
    name = greeting[MECHANISM].rstrip(b"\0") if greeting[:1] == SIGNATURE[:1] else b""
    return name.decode("ascii", "replace")


def _connected(endpoint: str) -> socket.socket:
    kind, _, place = endpoint.partition("://")
    if kind == "tcp":
        return socket.create_connection(
            (host_of(endpoint), int(place.rpartition(":")[2])), HANDSHAKE_TIMEOUT_S
        )
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(HANDSHAKE_TIMEOUT_S)
    try:
        connection.connect(place)
    except OSError:
        connection.close()
        raise
    return connection


class NotAdmitted(OperationError):
    """The receiver does not admit this sender: its key is not in the allow-list, or it has none."""


class WrongReceiver(OperationError):
    """The process at the endpoint does not prove to have the receiver's key, or is not a receiver."""


class ConnectionDamaged(OperationError):
    """A connection delivered data that ZeroMQ cannot read; a new connection may succeed."""


class SenderAuth:
    """Authenticates a sender's socket, and raises where connecting cannot succeed. Not thread-safe.

    libzmq alone reconnects for ever, or, after a plain refusal, never. A receiver that is not there yet, or
    not any more, is not an error. It is the ``security`` of one FrameSocket, which also needs
    ``watched=SenderAuth.WATCHED``. Raises UsageError and OperationError where the key files cannot be used.
    """

    WATCHED: ClassVar[int] = (
        zmq.EVENT_CONNECTED
        | zmq.EVENT_HANDSHAKE_SUCCEEDED
        | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        | zmq.EVENT_DISCONNECTED
    )

    def __init__(self, endpoint: str, keys: SenderKeys | None) -> None:
        self.is_made = False
        self._endpoint = endpoint
        self._keys = keys
        self._secret = load_secret(keys.secret) if keys else None
        self._receiver = load_public(keys.receiver) if keys else b""
        self._is_explained = False
        self._refusals = 0

    def note_event(self, event: int, value: int) -> None:
        """Handle an event of the socket. Called with every event, in order.

        Raises NotAdmitted, WrongReceiver or ConnectionDamaged, after which the socket cannot be used. Some
        refusals make it open another connection, for at most some seconds, to read the receiver's mechanism.
        """
        if event == zmq.EVENT_CONNECTED:
            self._is_explained = False
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.is_made, self._refusals = True, 0
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            raise self._not_admitted()
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            raise self._mismatch(value)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._is_explained = True
            self._count_refusal(value)
        elif event == zmq.EVENT_DISCONNECTED:
            if not self.is_made and not self._is_explained:
                raise self._wrong_receiver("what listens there is not a receiver; is the address right?")
            self.is_made = False

    def secure(self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes]) -> None:
        """Set up the socket. The FrameSocket calls it before it connects."""
        if self._secret:
            socket.setsockopt(zmq.CURVE_SERVERKEY, self._receiver)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret.secret)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self._secret.public)

    def close(self) -> bool:
        """Return False: nothing is open."""
        return False

    def _count_refusal(self, error: int) -> None:
        """Count a connection that the peer closed. A tunnel without a receiver behind it does so, too."""
        self._refusals = self._refusals + 1 if error in CLOSED_BY_PEER else 0
        if self._refusals % MAX_REFUSALS == 0 < self._refusals:
            mechanism = mechanism_of(self._endpoint)
            if self._keys and mechanism == "CURVE":
                raise self._wrong_receiver(
                    f"the receiver there has another key than {Path(self._keys.receiver).name}; copy its present "
                    f"{PUBLIC_SUFFIX} file here"
                )
            if mechanism == ("NULL" if self._keys else "CURVE"):
                raise self._other_mechanism()

    def _not_admitted(self) -> NotAdmitted:
        if not self._keys or not self._secret:
            return NotAdmitted(f"{self._endpoint}: the receiver there does not admit this sender")
        name = Path(self._keys.secret).name.removesuffix(PRIVATE_SUFFIX) + PUBLIC_SUFFIX
        return NotAdmitted(
            f"{self._endpoint}: the receiver there does not know this machine's key ({fingerprint(self._secret.public)}); "
            f"add {name} to its allow-list"
        )

    def _mismatch(self, reason: int) -> OperationError:
        if self.is_made:
            return ConnectionDamaged(f"{self._endpoint}: the data that arrived is damaged; connect again")
        if reason == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            return self._other_mechanism()
        return self._wrong_receiver("the handshake there is not that of a receiver of this release")

    def _other_mechanism(self) -> OperationError:
        if self._keys:
            return self._wrong_receiver(
                "the receiver there has no keys, so it cannot prove its identity; give it keys"
            )
        return NotAdmitted(
            f"{self._endpoint}: the receiver there needs a key; make one with prep keygen, add it to the receiver's "
            "allow-list and give it here as keys= (--key and --receiver)"
        )

    def _wrong_receiver(self, problem: str) -> WrongReceiver:
        return WrongReceiver(f"{self._endpoint}: {problem}")
