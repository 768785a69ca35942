"""The sender's end of the handshake, and what to think of one that fails."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import ClassVar

import zmq

from ...formats.errors import OperationError
from .greeting import mechanism_of
from .keys import PRIVATE_SUFFIX, PUBLIC_SUFFIX, fingerprint, load_public, load_secret
from .security import SenderKeys

REFUSALS = 3  # in a row: one may be a receiver's that is just ending
HUNG_UP = (errno.EPIPE, errno.ECONNRESET)


class NotAdmitted(OperationError):
    """The receiver does not let this sender in: its key is not in the allow-list, or it has none."""


class WrongReceiver(OperationError):
    """Who listens there cannot prove to have the receiver's key, has none, or is no receiver at all."""


class ConnectionDamaged(OperationError):
    """An open connection brought what ZeroMQ does not understand; a new one may be better."""


class Handshake:
    """Secures a sender's socket, and says when it is hopeless to try any longer. Not thread-safe.

    libzmq alone tries again for ever, or, after a plain refusal, never. A receiver that is not there yet, or not any
    more, is no failure. Serves one FrameSocket, as its ``security``, which is to be given
    ``watched=Handshake.WATCHED``. Raises UsageError and OperationError where the key files cannot be used.
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

    def heard(self, event: int, value: int) -> None:
        """Take note of an event of the socket; to be given every one, in order.

        Raises NotAdmitted, WrongReceiver or ConnectionDamaged, after which the socket is of no use. To find out who
        is there it may once in a while open a connection of its own, for at most some seconds.
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
                raise self._wrong("what listens there is no receiver; is the address right?")
            self.is_made = False

    def secure(self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes]) -> None:
        """Called by the FrameSocket before it connects."""
        if self._secret:
            socket.setsockopt(zmq.CURVE_SERVERKEY, self._receiver)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._secret.secret)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self._secret.public)

    def close(self) -> None:
        """Called by the FrameSocket; there is nothing to do."""

    def _count_refusal(self, error: int) -> None:
        """A receiver hangs up on who shakes hands wrongly; so does a tunnel whose far end is not there yet."""
        self._refusals = self._refusals + 1 if error in HUNG_UP else 0
        if self._refusals % REFUSALS == 0 < self._refusals:
            mechanism = mechanism_of(self._endpoint)
            if self._keys and mechanism == "CURVE":
                raise self._wrong(
                    f"the receiver there has another key than {Path(self._keys.receiver).name}; copy its present "
                    f"{PUBLIC_SUFFIX} file here"
                )
            if mechanism == ("NULL" if self._keys else "CURVE"):
                raise self._other_mechanism()

    def _not_admitted(self) -> NotAdmitted:
        if not self._keys or not self._secret:
            return NotAdmitted(f"{self._endpoint}: the receiver there does not let this sender in")
        name = Path(self._keys.secret).name.removesuffix(PRIVATE_SUFFIX) + PUBLIC_SUFFIX
        return NotAdmitted(
            f"{self._endpoint}: the receiver there does not know this machine's key ({fingerprint(self._secret.public)}); "
            f"add {name} to its allow-list"
        )

    def _mismatch(self, reason: int) -> OperationError:
        if self.is_made:
            return ConnectionDamaged(
                f"{self._endpoint}: what came over the connection is damaged; connect again"
            )
        if reason == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            return self._other_mechanism()
        return self._wrong("who is there does not shake hands as a receiver of this release does")

    def _other_mechanism(self) -> OperationError:
        if self._keys:
            return self._wrong("the receiver there has no keys, so it could be anybody; give it keys")
        return NotAdmitted(
            f"{self._endpoint}: the receiver there wants a key; make one with prep keygen, add it to the receiver's "
            "allow-list and give it here as keys= (--key and --receiver)"
        )

    def _wrong(self, problem: str) -> WrongReceiver:
        return WrongReceiver(f"{self._endpoint}: {problem}")
