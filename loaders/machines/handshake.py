"""The handshake of two machines, from both ends, with the allow-list and the errors of one that fails."""

from __future__ import annotations

import errno
import socket
import threading
from contextlib import suppress
from pathlib import Path

import zmq
from zmq.utils import z85

from shardprep.formats.errors import OperationError, ShardprepError
from shardprep.formats.runtime.owned import Owned, starting_thread
from shardprep.loaders.machines.keys import (
    PRIVATE_SUFFIX,
    PUBLIC_SUFFIX,
    ReceiverKeys,
    SenderKeys,
    fingerprint,
    host_of,
    load_allowed,
    load_public,
    load_secret,
)
from shardprep.loaders.machines.socket import DOMAIN

ENDPOINT = "inproc://zeromq.zap.01"
VERSION = b"1.0"


class ReceiverAuth(Owned):
    """Authenticates the peers of a receiver's socket. Thread-safe.

    With ``keys``, only peers that prove to have an allowed key are admitted, over an encrypted connection; no
    data of other peers reaches the process. Without, every peer with ZeroMQ's current protocol is admitted.
    It is the ``security`` of one FrameSocket.

    Raises UsageError and OperationError where the key files cannot be used.
    """

    def __init__(self, keys: ReceiverKeys | None) -> None:
        self._keys = keys
        self._secret = load_secret(keys.secret) if keys else None
        self._names: dict[str, str] = {}
        self._allowed: frozenset[bytes] = frozenset()
        self._refused = [0, 0]  # peers: by their handshake, and by the thread that authenticates
        self._is_counted = False
        self._connected = 0
        self._failure: BaseException | None = None
        self.reload()

    @property
    def refused(self) -> int:
        """The number of refused peers. Some are counted only when the connected ones have left."""
        return sum(self._refused)

    def reload(self) -> None:
        """Read the allow-list again. Raises where it cannot be used; the old one stays then.

        A peer with a removed key stays connected, so check each message with :meth:`admits`.
        """
        if self._keys:
            try:
                allowed = load_allowed(self._keys.allowed)
            except ShardprepError as error:
                remedy = "; until then the old allow-list applies (close the receiver to refuse all)"
                error.message += remedy if self._names else ""
                raise
            self._names = {fingerprint(public): name for public, name in allowed.items()}
            self._allowed = frozenset(allowed)  # last, so that every admitted peer has a name

    def admits(self, user: str) -> bool:
        """Return whether the allow-list now has the key of this :attr:`.Message.user`."""
        return self._keys is None or user in self._names

    def name_of(self, user: str) -> str:
        """Return the name of the key's file without ``.key``, "" where it is not in the list."""
        return self._names.get(user, "")

    def check(self) -> None:
        """Raise OperationError where the authenticating thread has died, so that all peers are refused."""
        if self._failure:
            raise OperationError(
                f"the thread that authenticates senders has died ({type(self._failure).__name__}); open this "
                "receiver again"
            ) from self._failure

    def note_event(self, event: int, value: int) -> None:
        """Count refused peers. One thread calls it with every event of the socket, in order."""
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._connected += 1
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._connected += 1  # until it is disconnected; _user_of() has counted it
        elif event in (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL):
            self._refused[0] += 1
            self._is_counted = True  # the next event is that it disconnects
        elif event == zmq.EVENT_DISCONNECTED:
            if not self._is_counted and not self._connected:
                self._refused[0] += 1  # another protocol, for which libzmq reports no other event
            elif not self._is_counted:
                self._connected -= 1
            self._is_counted = False

    def secure(self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes]) -> None:
        """Set up the socket. The FrameSocket calls it before it binds."""
        handler = context.socket(zmq.REP)
        try:
            handler.setsockopt(zmq.LINGER, 0)
            handler.bind(ENDPOINT)
            thread = threading.Thread(target=self._answer, args=[handler], name="shardprep-zap", daemon=True)
            with starting_thread():
                thread.start()
        except BaseException:
            handler.close()
            raise
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        if self._secret:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret.secret)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self._secret.public)

    def _answer(self, handler: zmq.Socket[bytes]) -> None:
        """Authenticate peers in a thread, until the context is terminated.

        After an exception every further peer is refused: libzmq refuses the peers of a socket with
        ZAP_ENFORCE_DOMAIN that has no handler, and HANDSHAKE_IVL ends a handshake that is not answered.
        """
        try:
            while True:
                _, number, domain, _, _, mechanism, *credentials = handler.recv_multipart()
                user = self._user_of(mechanism, credentials) if domain == DOMAIN else None
                code, text = (b"400", b"not admitted") if user is None else (b"200", b"admitted")
                handler.send_multipart([VERSION, number, code, text, (user or "").encode(), b""])
        except zmq.ContextTerminated:
            pass
        except Exception as error:
            self._failure = error
        finally:
            handler.close()

    def _user_of(self, mechanism: bytes, credentials: list[bytes]) -> str | None:
        """Return the user of a peer, None to refuse it."""
        if self._keys is None:
            return ""
        if mechanism == b"CURVE" and len(credentials) == 1:
            public = z85.encode(credentials[0])
            if public in self._allowed:
                return fingerprint(public)
        self._refused[1] += 1
        return None


# ZeroMQ's greeting, the first 64 bytes of a connection
SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
COMMAND_VERSION = b"\x03\x01"
MECHANISM = slice(12, 32)
GREETING_BYTES = 64

HANDSHAKE_TIMEOUT_S = 2.0
MAX_CONNECTION_REFUSALS = 3  # in a row, before the reason is determined; a closing receiver may cause one
CLOSED_BY_PEER = (errno.EPIPE, errno.ECONNRESET)


def mechanism_of(endpoint: str) -> str:
    """Return the mechanism of the receiver: ``"CURVE"`` with keys, ``"NULL"`` without.

    Returns "" where no ZeroMQ greeting arrives within some seconds. Sends no mechanism: a receiver with
    another one would close the connection, perhaps before its own greeting.
    """
    greeting, (kind, _, place) = b"", endpoint.partition("://")
    with suppress(OSError):
        if kind == "tcp":
            address = host_of(endpoint), int(place.rpartition(":")[2])
            connection = socket.create_connection(address, HANDSHAKE_TIMEOUT_S)
        else:
            connection = socket.socket(socket.AF_UNIX)
        with connection:
            if kind == "ipc":
                connection.settimeout(HANDSHAKE_TIMEOUT_S)
                connection.connect(place)
            connection.sendall(SIGNATURE + COMMAND_VERSION)
            while len(greeting) < MECHANISM.stop and (received := connection.recv(GREETING_BYTES)):
                greeting += received
    name = greeting[MECHANISM].rstrip(b"\0") if greeting[:1] == SIGNATURE[:1] else b""
    return name.decode("ascii", "replace")


class NotAdmitted(OperationError):
    """The receiver does not admit this sender: its key is not in the allow-list, or it has none."""


class WrongReceiver(OperationError):
    """The process at the endpoint does not prove to have the receiver's key, or is not a receiver."""


class ConnectionDamaged(OperationError):
    """A connection delivered data that ZeroMQ cannot read; a new connection may succeed."""


class SenderAuth:
    """Authenticates a sender's socket, and raises where connecting cannot succeed. Not thread-safe.

    libzmq alone reconnects for ever, or, after a plain refusal, never. A receiver that is not there yet, or
    not any more, is not an error. It is the ``security`` of one FrameSocket. Raises UsageError and
    OperationError where the key files cannot be used.
    """

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
            if self.is_made:
                raise ConnectionDamaged(f"{self._endpoint}: the data that arrived is damaged; connect again")
            if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
                raise self._other_mechanism()
            raise self._wrong_receiver("the handshake there is not that of a receiver of this release")
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._is_explained = True
            self._count_refusal(value)
        elif event == zmq.EVENT_DISCONNECTED:
            if not self.is_made and not self._is_explained:
                raise self._wrong_receiver("the peer there is not a receiver; is the address right?")
            self.is_made = False

    def secure(self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes]) -> None:
        """Set up the socket. The FrameSocket calls it before it connects."""
        if self._secret:
            socket.setsockopt(zmq.CURVE_SERVERKEY, self._receiver)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret.secret)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self._secret.public)

    def _count_refusal(self, error: int) -> None:
        """Count a connection that the peer closed. A tunnel without a receiver behind it does so, too."""
        self._refusals = self._refusals + 1 if error in CLOSED_BY_PEER else 0
        if self._refusals % MAX_CONNECTION_REFUSALS == 0 < self._refusals:
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

    def _other_mechanism(self) -> OperationError:
        if self._keys:
            problem = "the receiver there has no keys, so it cannot prove its identity; give it keys"
            return self._wrong_receiver(problem)
        return NotAdmitted(
            f"{self._endpoint}: the receiver there needs a key; make one with prep keygen, add it to the receiver's "
            "allow-list and give it here as keys= (--key and --receiver)"
        )

    def _wrong_receiver(self, problem: str) -> WrongReceiver:
        return WrongReceiver(f"{self._endpoint}: {problem}")
