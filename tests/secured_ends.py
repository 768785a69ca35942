"""Both ends of a secured wire, without the protocol that runs on it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import zmq

from shardprep.loaders.frame_socket import FrameSocket, Message
from shardprep.loaders.remote.gate import Gate
from shardprep.loaders.remote.handshake import Handshake
from shardprep.loaders.remote.security import ReceiverKeys, SenderKeys

ANY_PORT = "tcp://127.0.0.1:*"
PATIENCE = 20.0
HANDSHAKE_MS = 400
LIMIT = 1 << 20  # bytes of a message


class Receiver:
    """A receiver's socket, and what came of it: messages, and what its gate counts."""

    def __init__(self, keys: ReceiverKeys | None, endpoint: str = ANY_PORT) -> None:
        self.gate = Gate(keys)
        self.socket = FrameSocket(
            zmq.ROUTER,
            endpoint,
            bind=True,
            options={zmq.HANDSHAKE_IVL: HANDSHAKE_MS, zmq.MAXMSGSIZE: LIMIT},
            watched=Gate.WATCHED,
            security=self.gate,
        )
        self.endpoint = self.socket.endpoint
        self.came: list[Message] = []

    @property
    def port(self) -> int:
        return int(self.endpoint.rpartition(":")[2])

    @property
    def whys(self) -> set[str]:
        return {refusal.why for refusal in self.gate.refusals}

    def look(self) -> None:
        self.socket.wait(0.01)
        for event in self.socket.events():
            self.gate.heard(*event)
        while message := self.socket.receive():
            self.came.append(message)


class Sender:
    """A sender's socket that has one message for the receiver."""

    def __init__(self, endpoint: str, keys: SenderKeys | None) -> None:
        self.handshake = Handshake(endpoint, keys)
        options = {zmq.HANDSHAKE_IVL: HANDSHAKE_MS, zmq.RECONNECT_IVL: 20}
        self.socket = FrameSocket(
            zmq.DEALER,
            endpoint,
            bind=False,
            options=options,
            watched=Handshake.WATCHED,
            security=self.handshake,
        )
        self.socket.send([b"batch"])

    def look(self) -> None:
        self.socket.wait(0.01)
        for event in self.socket.events():
            self.handshake.heard(*event)


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


def until(happened: Callable[[], Any], *ends: Receiver | Sender, patience: float = PATIENCE) -> Any:
    """Look after the ends until that happened; what it was, or what it is once patience has run out."""
    deadline = time.monotonic() + patience
    while not (result := happened()) and time.monotonic() < deadline:
        for end in ends:
            end.look()
    return result
