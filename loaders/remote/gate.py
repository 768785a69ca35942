"""Who may come in: the receiver's end of the handshake, and the list of those whom it knows."""

from __future__ import annotations

import threading
from collections import deque
from typing import ClassVar, NamedTuple

import zmq
from zmq.utils import z85

from ...formats.errors import OperationError, ShardprepError
from .keys import fingerprint, load_allowed, load_secret
from .security import ReceiverKeys
from .zap import DOMAIN, ZapHandler

REMEMBERED = 100

UNKNOWN_KEY = "unknown key"
NO_KEY = "no key"
OTHER_KEY = "key of another receiver, or damage on the way"
NOT_A_SENDER = "not a sender"
FAILED = "handshake failed"

REASONS: dict[int, str] = {
    zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: NO_KEY,
    zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC: OTHER_KEY,
}


class Refusal(NamedTuple):
    """Why a peer did not come in, and from which address where that is known: libzmq tells it of unknown keys only."""

    address: str
    why: str


class Gate:
    """Secures a receiver's socket, and says of each peer who it is. Thread-safe.

    With ``keys`` only peers come in that prove to have one of the allowed keys, over an encrypted connection, and
    nobody else can put a byte into the application. Without, everybody comes in who speaks ZeroMQ's present
    protocol. Serves one FrameSocket, as its ``security``, which is to be given ``watched=Gate.WATCHED``.

    Raises UsageError and OperationError where the key files cannot be used.
    """

    WATCHED: ClassVar[int] = (
        zmq.EVENT_HANDSHAKE_SUCCEEDED
        | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        | zmq.EVENT_DISCONNECTED
    )

    def __init__(self, keys: ReceiverKeys | None) -> None:
        self._keys = keys
        self._secret = load_secret(keys.secret) if keys else None
        self._names: dict[str, str] = {}
        self._allowed: frozenset[bytes] = frozenset()
        self._lock = threading.Lock()
        self._refusals: deque[Refusal] = deque(maxlen=REMEMBERED)
        self._refused = 0
        self._is_told = False
        self._connected = 0
        self._handler: ZapHandler | None = None
        self.reload()

    @property
    def refused(self) -> int:
        """How many peers did not come in; those that gave no reason are counted once as many others have left."""
        return self._refused

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """The last 100 of them, oldest first."""
        with self._lock:
            return tuple(self._refusals)

    def reload(self) -> None:
        """Read the allow-list again. Where it cannot be used, raises and stays as it was.

        Who was removed keeps the connection, so ask :meth:`admits` of each message.
        """
        if self._keys:
            try:
                allowed = load_allowed(self._keys.allowed)
            except ShardprepError as error:
                if self._names:
                    error.message += (
                        "; until then who was allowed still is (close the receiver to shut all out)"
                    )
                raise
            self._names = {fingerprint(public): name for public, name in allowed.items()}
            self._allowed = frozenset(allowed)  # last, so that who comes in has a name

    def admits(self, user: str) -> bool:
        """Whether the allow-list has, now, the key of this :attr:`.Message.user`."""
        return self._keys is None or user in self._names

    def name_of(self, user: str) -> str:
        """The name of the key's file without ``.key``, "" where it is not in the list."""
        return self._names.get(user, "")

    def check(self) -> None:
        """Raise OperationError where nobody can come in any more because the thread that decides has died."""
        if self._handler and self._handler.failure:
            raise OperationError(
                f"the thread that lets senders in has died ({type(self._handler.failure).__name__}); open this "
                "receiver again"
            ) from self._handler.failure

    def heard(self, event: int, value: int) -> None:
        """Count what did not come in; to be given every event of the socket, in order, by one thread."""
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._connected += 1
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._connected += 1  # until it is disconnected; admit() has counted it
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self._tell(REASONS.get(value, FAILED))
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._tell(FAILED)
        elif event == zmq.EVENT_DISCONNECTED:
            self._count_disconnected()

    def _tell(self, why: str) -> None:
        """The next event is that it is disconnected."""
        self._refuse("", why)
        self._is_told = True

    def _count_disconnected(self) -> None:
        """libzmq tells no reason where a peer speaks another protocol."""
        if not self._is_told and not self._connected:
            self._refuse("", NOT_A_SENDER)
        elif not self._is_told:
            self._connected -= 1
        self._is_told = False

    def secure(self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes]) -> None:
        """Called by the FrameSocket before it binds."""
        self._handler = ZapHandler(context, self._admit)
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        if self._secret:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret.secret)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self._secret.public)

    def close(self) -> None:
        """Called by the FrameSocket when it is closed; no thread is left. Idempotent."""
        if self._handler:
            self._handler.close()

    def _admit(self, mechanism: str, credentials: list[bytes], address: str) -> str | None:
        """In the handler's thread."""
        if self._keys is None:
            return ""
        if mechanism == "CURVE" and len(credentials) == 1:
            public = z85.encode(credentials[0])
            if public in self._allowed:
                return fingerprint(public)
        self._refuse(address, UNKNOWN_KEY)
        return None

    def _refuse(self, address: str, why: str) -> None:
        with self._lock:
            self._refused += 1
            self._refusals.append(Refusal(address, why))
