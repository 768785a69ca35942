"""Admitted and refused peers: real sockets over loopback, and whatever may connect to them."""

import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import zmq

from shardprep.formats.errors import OperationError, UsageError
from shardprep.loaders.machines.keys import ReceiverAuth, ReceiverKeys, SenderAuth, SenderKeys, WrongReceiver
from shardprep.loaders.machines.socket import FrameSocket, Message
from support.key_files import KeyFolder
from support.remote_ends import Tunnel
from support.sampling import torture_except
from support.zmtp_peer import SIGNATURE, reset

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
            secure=self.auth.secure,
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
            zmq.DEALER, endpoint, bind=False, most_bytes=MAX_BYTES, options=options, secure=self.auth.secure
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


NO_RESULT_TIMEOUT_S = 0.5  # longer than HANDSHAKE_TIMEOUT_MS

CURVE_GREETING = (SIGNATURE + b"\x03\x01" + b"CURVE").ljust(64, b"\0")


def gets_through(receiver: Receiver, keys: SenderKeys | None) -> Message:
    """Return the message of a sender that must be admitted."""
    before = len(receiver.received)
    with sending(receiver.endpoint, keys) as sender:
        assert until(lambda: len(receiver.received) > before, receiver, sender)
    return receiver.received[-1]


@pytest.fixture
def receiver(keys: KeyFolder) -> Iterator[Receiver]:
    with receiving(keys.receiver) as receiver:
        yield receiver


# Admission


def test_an_allow_list_that_cannot_be_read_again_stays_as_it_was(receiver: Receiver, keys: KeyFolder) -> None:
    keys.disallow("data1")
    (keys.allowed / "data2.key").write_text("damaged")
    with pytest.raises(UsageError, match="the old allow-list applies"):
        receiver.auth.reload()
    gets_through(receiver, keys.sender("data1"))


# Other processes in place of the receiver


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that calls ``answer`` with each connection; the endpoint."""
    is_over = threading.Event()
    with ExitStack() as held, socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)

        def serve() -> None:
            while not is_over.is_set():
                with suppress(TimeoutError):
                    answer(held.enter_context(server.accept()[0]))

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"tcp://127.0.0.1:{server.getsockname()[1]}"
        finally:
            is_over.set()
            thread.join()


def http(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")


def test_a_process_that_is_not_a_receiver_is_reported(keys: KeyFolder) -> None:
    with (
        answering(http) as endpoint,
        sending(endpoint, keys.sender()) as sender,
        pytest.raises(WrongReceiver, match="not a receiver"),
    ):
        until(lambda: False, sender)


def say_nothing(connection: socket.socket) -> None:
    pass


@pytest.mark.slow
@pytest.mark.parametrize(
    "answer", torture_except([socket.socket.close, reset, say_nothing], socket.socket.close)
)
@pytest.mark.parametrize("with_keys", [True, False])
def test_a_tunnel_without_a_receiver_behind_it_is_not_an_error(
    keys: KeyFolder, answer: Callable[[socket.socket], None], with_keys: bool
) -> None:
    with answering(answer) as endpoint, sending(endpoint, keys.sender() if with_keys else None) as sender:
        until(lambda: False, sender, timeout_s=NO_RESULT_TIMEOUT_S)
        assert not sender.auth.is_made


# The authenticator fails


@pytest.mark.slow
def test_without_an_authenticator_every_peer_is_refused(
    keys: KeyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReceiverAuth, "_answer", lambda _, handler: handler.close())
    with receiving(keys.receiver) as receiver, sending(receiver.endpoint, keys.sender()):
        until(lambda: False, receiver, timeout_s=NO_RESULT_TIMEOUT_S)
        assert receiver.received == []
        assert receiver.auth.refused > 0


# A process between the two


def test_what_is_changed_on_its_way_to_the_receiver_never_arrives(
    receiver: Receiver, keys: KeyFolder
) -> None:
    with Tunnel(receiver.endpoint) as tunnel, sending(tunnel.endpoint, keys.sender()) as sender:
        assert until(lambda: receiver.received, receiver, sender)
        tunnel.flip(back=False)
        sender.socket.send([b"pixels"])
        assert until(lambda: receiver.auth.refused, receiver)
    assert len(receiver.received) == 1


def test_no_text_is_seen_on_the_wire(receiver: Receiver, keys: KeyFolder) -> None:
    seen = bytearray()

    def overhear(data: bytes, is_back: bool) -> bytes:
        seen.extend(data)
        return data

    with Tunnel(receiver.endpoint) as tunnel:
        tunnel.treat = overhear
        with sending(tunnel.endpoint, keys.sender()) as sender:
            sender.socket.send([b"the first batch of pixels"])
            assert until(lambda: len(receiver.received) == 2, receiver, sender)
    assert receiver.received[1].parts[0].bytes == b"the first batch of pixels"
    assert b"CURVE" in seen
    assert b"pixels" not in seen


# Strange connections


def of_memory() -> int:
    """Return the bytes that this process has in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def knock(port: int, data: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
    with suppress(OSError):
        connection.sendall(data)
    return connection


@pytest.mark.parametrize("declared", [MAX_BYTES + 1, 600 << 20, (1 << 63) - 1])
def test_an_oversized_handshake_is_not_read(receiver: Receiver, declared: int) -> None:
    before = of_memory()
    sent = 0
    with knock(receiver.port, CURVE_GREETING + b"\x06" + struct.pack(">Q", declared)) as connection:
        with suppress(ConnectionError):
            while sent < 64 << 20:
                sent += connection.send(bytes(1 << 20))
        assert sent < 64 << 20, "the receiver has read on"
    assert until(lambda: receiver.auth.refused, receiver)
    assert of_memory() - before < 16 << 20


def test_an_endpoint_that_is_taken_leaves_no_thread(receiver: Receiver, keys: KeyFolder) -> None:
    with pytest.raises(OperationError, match="in use"):
        Receiver(keys.receiver, receiver.endpoint)

    def threads() -> int:
        return [thread.name for thread in threading.enumerate()].count("shardprep-zap")

    assert until(lambda: threads() == 1, receiver)
