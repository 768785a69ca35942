"""Admitted and refused peers: real sockets over loopback, and whatever may connect to them."""

import resource
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Self

import pytest

from shardprep.formats.errors import OperationError, UsageError
from shardprep.loaders.machines.handshake import (
    ConnectionDamaged,
    NotAdmitted,
    ReceiverAuth,
    WrongReceiver,
)
from shardprep.loaders.machines.keys import SenderKeys
from shardprep.loaders.machines.socket import Message
from support.key_files import KeyFolder
from support.sampling import torture_except
from support.secured_ends import MAX_BYTES, TIMEOUT_S, Receiver, receiving, sending, until

NO_RESULT_TIMEOUT_S = 0.5  # longer than HANDSHAKE_TIMEOUT_MS

SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
CURVE_GREETING = (SIGNATURE + b"\x03\x01" + b"CURVE").ljust(64, b"\0")


def gets_through(receiver: Receiver, keys: SenderKeys | None) -> Message:
    """Return the message of a sender that must be admitted."""
    before = len(receiver.received)
    with sending(receiver.endpoint, keys) as sender:
        assert until(lambda: len(receiver.received) > before, receiver, sender)
    return receiver.received[-1]


def is_refused(
    receiver: Receiver, keys: SenderKeys | None, error: type[Exception], match: str | None = None
) -> None:
    """Check that the sender ends with that error, and that nothing of it arrives."""
    before = len(receiver.received)
    with sending(receiver.endpoint, keys) as sender, pytest.raises(error, match=match):
        until(lambda: False, receiver, sender)
    until(lambda: False, receiver, timeout_s=0.1)
    assert len(receiver.received) == before


@pytest.fixture
def keys(tmp_path: Path) -> KeyFolder:
    return KeyFolder(tmp_path)


@pytest.fixture
def receiver(keys: KeyFolder) -> Iterator[Receiver]:
    with receiving(keys.receiver) as receiver:
        yield receiver


# Admission


def test_the_key_of_another_receiver_is_refused_with_a_reason(receiver: Receiver, keys: KeyFolder) -> None:
    wrong = keys.sender(receiver="data2")
    is_refused(receiver, wrong, WrongReceiver, r"another key than data2\.key")
    assert receiver.auth.refused


def test_a_receiver_without_keys_is_not_trusted(keys: KeyFolder) -> None:
    with receiving(None) as receiver:
        is_refused(receiver, keys.sender(), WrongReceiver, "no keys")


@pytest.mark.slow
def test_after_every_refusal_allowed_senders_are_admitted(receiver: Receiver, keys: KeyFolder) -> None:
    is_refused(receiver, keys.sender("stranger"), NotAdmitted)
    is_refused(receiver, None, NotAdmitted)
    is_refused(receiver, keys.sender(receiver="data2"), WrongReceiver)
    assert receiver.auth.name_of(gets_through(receiver, keys.sender()).user) == "data1"
    assert receiver.auth.refused >= 3


def test_a_key_can_be_removed_while_its_sender_is_connected(receiver: Receiver, keys: KeyFolder) -> None:
    with sending(receiver.endpoint, keys.sender("data2")) as sender:
        assert until(lambda: receiver.received, receiver, sender)
        user = receiver.received[-1].user
        keys.disallow("data2")
        assert receiver.auth.admits(user), "only reload() reads the list"
        receiver.auth.reload()
        assert not receiver.auth.admits(user)
        assert receiver.auth.name_of(user) == ""
    is_refused(receiver, keys.sender("data2"), NotAdmitted)


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


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def hang_up(connection: socket.socket) -> None:
    connection.close()


def say_nothing(connection: socket.socket) -> None:
    pass


@pytest.mark.slow
@pytest.mark.parametrize("answer", torture_except([hang_up, reset, say_nothing], hang_up))
@pytest.mark.parametrize("with_keys", [True, False])
def test_a_tunnel_without_a_receiver_behind_it_is_not_an_error(
    keys: KeyFolder, answer: Callable[[socket.socket], None], with_keys: bool
) -> None:
    with (
        answering(answer) as endpoint,
        sending(endpoint, keys.sender() if with_keys else None) as sender,
    ):
        until(lambda: False, sender, timeout_s=NO_RESULT_TIMEOUT_S)
        assert not sender.auth.is_made


# The authenticator fails


@pytest.mark.slow
def test_an_authenticator_that_has_died_refuses_every_peer_and_is_reported(
    receiver: Receiver, keys: KeyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    gets_through(receiver, keys.sender())

    def broken(*_: object) -> str:
        raise MemoryError

    monkeypatch.setattr(receiver.auth, "_user_of", broken)
    with sending(receiver.endpoint, keys.sender()) as sender:
        until(lambda: False, receiver, timeout_s=NO_RESULT_TIMEOUT_S)
        assert not sender.auth.is_made
    with sending(receiver.endpoint, keys.sender()):
        until(lambda: False, receiver, timeout_s=NO_RESULT_TIMEOUT_S)
    assert len(receiver.received) == 1
    with pytest.raises(OperationError, match="MemoryError"):
        receiver.auth.check()


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


FORTH, BACK = "to the receiver", "to the sender"


class Between:
    """Forwards data between a sender and the receiver, as ``treat(data, way)`` returns it."""

    def __init__(self, port: int) -> None:
        self.treat: Callable[[bytes, str], bytes] = lambda data, way: data
        self._port = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(TIMEOUT_S)
        self.endpoint = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def flip(self, on: str) -> None:
        """Change the last bit of all data in one direction from now on."""
        self.treat = lambda data, way: data[:-1] + bytes([data[-1] ^ 1]) if way == on else data

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        with (
            self._server,
            self._server.accept()[0] as sender,
            socket.create_connection(("127.0.0.1", self._port)) as receiver,
            suppress(ConnectionError),
        ):
            ways = {sender: (receiver, FORTH), receiver: (sender, BACK)}
            while not self._ended.is_set():
                for end in select.select(ways, [], [], 0.05)[0]:
                    other, way = ways[end]
                    if not (data := end.recv(1 << 16)):
                        return
                    other.sendall(self.treat(data, way))


@pytest.fixture
def between(receiver: Receiver) -> Iterator[Between]:
    with Between(receiver.port) as between:
        yield between


def test_what_is_changed_on_its_way_to_the_receiver_never_arrives(
    receiver: Receiver, keys: KeyFolder, between: Between
) -> None:
    with sending(between.endpoint, keys.sender()) as sender:
        assert until(lambda: receiver.received, receiver, sender)
        between.flip(on=FORTH)
        sender.socket.send([b"pixels"])
        assert until(lambda: receiver.auth.refused, receiver)
    assert len(receiver.received) == 1


def test_what_is_changed_on_its_way_to_the_sender_is_reported(
    receiver: Receiver, keys: KeyFolder, between: Between
) -> None:
    with sending(between.endpoint, keys.sender()) as sender:
        assert until(lambda: receiver.received, receiver, sender)
        between.flip(on=BACK)
        receiver.socket.send([b"credit"], peer=receiver.received[0].peer)
        with pytest.raises(ConnectionDamaged, match="connect again"):
            until(lambda: False, receiver, sender)
        assert sender.socket.receive() is None


def test_no_text_is_seen_on_the_wire(receiver: Receiver, keys: KeyFolder, between: Between) -> None:
    seen = bytearray()

    def overhear(data: bytes, way: str) -> bytes:
        seen.extend(data)
        return data

    between.treat = overhear
    with sending(between.endpoint, keys.sender()) as sender:
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


# What is kept


def test_an_endpoint_that_is_taken_leaves_no_thread(receiver: Receiver, keys: KeyFolder) -> None:
    with pytest.raises(OperationError, match="in use"):
        Receiver(keys.receiver, receiver.endpoint)

    def threads() -> int:
        return [thread.name for thread in threading.enumerate()].count("shardprep-zap")

    assert until(lambda: threads() == 1, receiver)
