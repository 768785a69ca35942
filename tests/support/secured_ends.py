"""Both ends of an authenticated connection, without a protocol on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import zmq

from shardprep.loaders.machines.handshake import ReceiverAuth, SenderAuth
from shardprep.loaders.machines.keys import ReceiverKeys, SenderKeys
from shardprep.loaders.machines.socket import FrameSocket, Message

ANY_PORT = "tcp://127.0.0.1:*"
TIMEOUT_S = 20.0
HANDSHAKE_TIMEOUT_MS = 400
MAX_BYTES = 1 << 20  # bytes of a message


class Receiver:
    """A receiver's socket, and the messages that it received."""

    def __init__(self, keys: ReceiverKeys | None, endpoint: str = ANY_PORT) -> None:
        self.auth = ReceiverAuth(keys)
        self.socket = FrameSocket(
            zmq.ROUTER,
            endpoint,
            bind=True,
            most_bytes=MAX_BYTES,
            options={zmq.HANDSHAKE_IVL: HANDSHAKE_TIMEOUT_MS, zmq.MAXMSGSIZE: MAX_BYTES},
            watched=ReceiverAuth.WATCHED,
            security=self.auth,
        )
        self.endpoint = self.socket.endpoint
        self.received: list[Message] = []

    @property
    def port(self) -> int:
        return int(self.endpoint.rpartition(":")[2])

    def poll(self) -> None:
        self.socket.wait(0.01)
        for event in self.socket.events():
            self.auth.note_event(*event)
        while message := self.socket.receive():
            self.received.append(message)


class Sender:
    """A sender's socket that has one message for the receiver."""

    def __init__(self, endpoint: str, keys: SenderKeys | None) -> None:
        self.auth = SenderAuth(endpoint, keys)
        options = {zmq.HANDSHAKE_IVL: HANDSHAKE_TIMEOUT_MS, zmq.RECONNECT_IVL: 20}
        self.socket = FrameSocket(
            zmq.DEALER,
            endpoint,
            bind=False,
            most_bytes=MAX_BYTES,
            options=options,
            watched=SenderAuth.WATCHED,
            security=self.auth,
        )
        self.socket.send([b"batch"])

    def poll(self) -> None:
        self.socket.wait(0.01)
        for event in self.socket.events():
            self.auth.note_event(*event)


@contextmanager
def receiving(keys: ReceiverKeys | None, endpoint: str = ANY_PORT) -> Iterator[Receiver]:
    receiver = Receiver(keys, endpoint)
    try:
        yield receiver
    finally:
        receiver.socket.close()


@contextmanager
def sending(endpoint: str, keys: SenderKeys | None) -> Iterator[Sender]:
    sender = Sender(endpoint, keys)
    try:
        yield sender
    finally:
        sender.socket.close()


def until(happened: Callable[[], Any], *ends: Receiver | Sender, timeout_s: float = TIMEOUT_S) -> Any:
    """Poll the ends until ``happened()`` is true, for at most ``timeout_s``; return its last value."""
    deadline = time.monotonic() + timeout_s
    while not (result := happened()) and time.monotonic() < deadline:
        for end in ends:
            end.poll()
    return result
