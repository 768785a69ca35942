"""ZeroMQ's authentication protocol (RFC 27): libzmq asks, for every handshake, whether the peer may come in."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from socket import socketpair

import zmq

ENDPOINT = "inproc://zeromq.zap.01"
DOMAIN = b"prep"
VERSION = b"1.0"

Admit = Callable[[str, list[bytes], str], str | None]
"""``admit(mechanism, credentials, address)``: the user as which a peer comes in, None where it must not."""


class ZapHandler:
    """Answers for all sockets of a context, in a thread of its own, until ``close()``.

    ``admit`` is called in that thread. Whatever goes wrong there ends the thread, is kept as ``failure``, and
    from then on nobody comes in: libzmq refuses all of a socket with ZAP_ENFORCE_DOMAIN whose handler is gone, and
    HANDSHAKE_IVL ends a handshake that it does not answer.
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
            self._thread.start()
        except BaseException:
            self._release()
            self._waker.close()
            raise

    def close(self) -> None:
        """The thread has ended when this returns. Idempotent, from any thread."""
        with suppress(OSError):  # closed already
            self._waker.send(b"x")
        self._thread.join()
        self._waker.close()

    def _run(self) -> None:
        try:
            while not self._is_closing():
                self._answer()
        except Exception as error:
            self.failure = error
        finally:
            self._release()

    def _is_closing(self) -> bool:
        """Once there is something to do."""
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
