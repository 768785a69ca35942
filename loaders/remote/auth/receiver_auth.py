"""The receiver's end of the handshake, and its allow-list."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from socket import socketpair
from typing import ClassVar, NamedTuple

import zmq
from zmq.utils import z85

from shardprep.formats.errors import OperationError, ShardprepError
from shardprep.formats.processes.thread_start import starting_thread
from shardprep.formats.system.owned import Owned

from .keys import ReceiverKeys, fingerprint, load_allowed, load_secret

ENDPOINT = "inproc://zeromq.zap.01"
DOMAIN = b"prep"
VERSION = b"1.0"
THREAD_EXIT_TIMEOUT_S = 5.0  # for which close() waits until the thread has ended

MAX_REFUSALS = 100  # that are kept

UNKNOWN_KEY = "unknown key"
NO_KEY = "no key"
OTHER_KEY = "key of another receiver, or damaged data"
NOT_A_SENDER = "not a sender"
FAILED = "handshake failed"

REASONS: dict[int, str] = {
    zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: NO_KEY,
    zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC: OTHER_KEY,
}

Admit = Callable[[str, list[bytes], str], str | None]
"""``admit(mechanism, credentials, address)`` returns the user of a peer, None where the peer is refused."""


class ZapHandler(Owned):
    """Authenticates the peers of all sockets of a context, in a thread, until ``close()``.

    ``admit`` is called in that thread. An exception ends the thread and is kept as ``failure``; every further
    peer is refused: libzmq refuses the peers of a socket with ZAP_ENFORCE_DOMAIN that has no handler, and
    HANDSHAKE_IVL ends a handshake that a handler does not answer.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], admit: Admit) -> None:
        self.failure: BaseException | None = None
        self._admit = admit
        self._woken, self._waker = socketpair()
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._thread = threading.Thread(target=self._run, name="shardprep-zap", daemon=True)
        try:
            self._socket.bind(ENDPOINT)
            with starting_thread():
                self._thread.start()
        except BaseException:
            self._release()
            self._waker.close()
            raise

    def close(self) -> bool:
        """End the thread. Return whether it still runs after some seconds. Idempotent."""
        with suppress(OSError):  # closed already
            self._waker.send(b"x")
        self._thread.join(THREAD_EXIT_TIMEOUT_S)
        self._waker.close()
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._is_closing():
                self._answer()
        except Exception as error:
            self.failure = error
        finally:
            self._release()

    def _is_closing(self) -> bool:
        """Wait for a request or for close(); return whether it was close()."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        return self._socket not in dict(poller.poll())

    def _answer(self) -> None:
        _, number, domain, address, _, mechanism, *credentials = self._socket.recv_multipart()
        user = None
        if domain == DOMAIN:
            user = self._admit(mechanism.decode(), credentials, address.decode())
        code, text = (b"400", b"not admitted") if user is None else (b"200", b"admitted")
        self._socket.send_multipart([VERSION, number, code, text, (user or "").encode(), b""])

    def _release(self) -> None:
        self._socket.close()
        self._woken.close()


class Refusal(NamedTuple):
    """The reason why a peer was refused. libzmq reports the address only of unknown keys; else it is ""."""

    address: str
    reason: str


class ReceiverAuth(Owned):
    """Authenticates the peers of a receiver's socket. Thread-safe.

    With ``keys``, only peers that prove to have an allowed key are admitted, over an encrypted connection; no
    data of other peers reaches the process. Without, every peer with ZeroMQ's current protocol is admitted.
    It is the ``security`` of one FrameSocket, which also needs ``watched=ReceiverAuth.WATCHED``.

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
        self._refusals: deque[Refusal] = deque(maxlen=MAX_REFUSALS)
        self._refused = 0
        self._is_counted = False
        self._connected = 0
        self._handler: ZapHandler | None = None
        self.reload()

    @property
    def refused(self) -> int:
        """The number of refused peers. Some are counted only when the connected ones have left."""
        return self._refused

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """The last 100 refusals, oldest first."""
        with self._lock:
            return tuple(self._refusals)

    def reload(self) -> None:
        """Read the allow-list again. Raises where it cannot be used; the old one stays then.

        A peer with a removed key stays connected, so check each message with :meth:`admits`.
        """
        if self._keys:
            try:
                allowed = load_allowed(self._keys.allowed)
            except ShardprepError as error:
                if self._names:
                    error.message += (
                        "; until then the old allow-list is used (close the receiver to refuse all)"
                    )
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
        if self._handler and self._handler.failure:
            raise OperationError(
                f"the thread that authenticates senders has died ({type(self._handler.failure).__name__}); open this "
                "receiver again"
            ) from self._handler.failure

    def note_event(self, event: int, value: int) -> None:
        """Count refused peers. One thread calls it with every event of the socket, in order."""
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._connected += 1
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._connected += 1  # until it is disconnected; _admit() has counted it
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self._count_failed(REASONS.get(value, FAILED))
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._count_failed(FAILED)
        elif event == zmq.EVENT_DISCONNECTED:
            self._count_disconnected()

    def _count_failed(self, reason: str) -> None:
        self._refuse("", reason)
        self._is_counted = True  # the next event is that it disconnects

    def _count_disconnected(self) -> None:
        """Count a peer with another protocol, for which libzmq reports no other event."""
        if not self._is_counted and not self._connected:
            self._refuse("", NOT_A_SENDER)
        elif not self._is_counted:
            self._connected -= 1
        self._is_counted = False

    def secure(self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes]) -> None:
        """Set up the socket. The FrameSocket calls it before it binds."""
        self._handler = ZapHandler(context, self._admit)
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        if self._secret:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret.secret)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self._secret.public)

    def close(self) -> bool:
        """End the thread; return whether it still runs. The FrameSocket calls it at its end. Idempotent."""
        return self._handler.close() if self._handler else False

    def _admit(self, mechanism: str, credentials: list[bytes], address: str) -> str | None:
        """Return the user of a peer, None to refuse it. Runs in the handler's thread."""
        if self._keys is None:
            return ""
        if mechanism == "CURVE" and len(credentials) == 1:
            public = z85.encode(credentials[0])
            if public in self._allowed:
                return fingerprint(public)
        self._refuse(address, UNKNOWN_KEY)
        return None

    def _refuse(self, address: str, reason: str) -> None:
        with self._lock:
            self._refused += 1
            self._refusals.append(Refusal(address, reason))
