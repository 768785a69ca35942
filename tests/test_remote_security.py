"""Who gets onto a wire and who does not: real sockets over loopback, and everything that may knock at them."""

import random
import resource
import select
import socket
import stat
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Self

import pytest
import zmq
from key_files import KeyFolder
from secured_ends import ANY_PORT, LIMIT, PATIENCE, Receiver, receiving, sending, until

from shardprep.formats.errors import OperationError, UsageError
from shardprep.loaders.frame_socket import Message
from shardprep.loaders.remote import gate as gate_module
from shardprep.loaders.remote.gate import REMEMBERED, Gate, Refusal
from shardprep.loaders.remote.handshake import ConnectionDamaged, Handshake, NotAdmitted, WrongReceiver
from shardprep.loaders.remote.security import SenderKeys
from shardprep.loaders.remote.zap import ZapHandler

A_WHILE = 0.5  # longer than HANDSHAKE_MS

SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
CURVE_GREETING = (SIGNATURE + b"\x03\x01" + b"CURVE").ljust(64, b"\0")


def gets_through(receiver: Receiver, keys: SenderKeys | None) -> Message:
    """The message of a sender that must get through."""
    before = len(receiver.came)
    with sending(receiver.endpoint, keys) as sender:
        assert until(lambda: len(receiver.came) > before, receiver, sender)
    return receiver.came[-1]


def is_refused(
    receiver: Receiver, keys: SenderKeys | None, error: type[Exception], match: str | None = None
) -> None:
    """The sender ends with that error, and nothing of it arrives."""
    before = len(receiver.came)
    with sending(receiver.endpoint, keys) as sender, pytest.raises(error, match=match):
        until(lambda: False, receiver, sender)
    until(lambda: False, receiver, patience=0.1)
    assert len(receiver.came) == before


@pytest.fixture
def keys(tmp_path: Path) -> KeyFolder:
    return KeyFolder(tmp_path)


@pytest.fixture
def receiver(keys: KeyFolder) -> Iterator[Receiver]:
    with receiving(keys.receiver) as receiver:
        yield receiver


# Who comes in


@pytest.mark.parametrize("place", ["tcp://127.0.0.1:*", "tcp://[::1]:*", "ipc"])
def test_an_allowed_key_comes_in_under_its_name(keys: KeyFolder, tmp_path: Path, place: str) -> None:
    if "[" in place and not socket.has_ipv6:
        pytest.skip("no IPv6")
    with receiving(keys.receiver, f"ipc://{tmp_path}/frames" if place == "ipc" else place) as receiver:
        for name in ("data1", "data2"):
            message = gets_through(receiver, keys.sender(name))
            assert receiver.gate.name_of(message.user) == name
            assert receiver.gate.admits(message.user)
        receiver.gate.check()
    assert receiver.gate.refused == 0


def test_without_keys_everybody_comes_in_and_is_nobody() -> None:
    with receiving(None) as receiver:
        message = gets_through(receiver, None)
    assert message.user == receiver.gate.name_of("") == ""
    assert receiver.gate.admits("")


def test_an_unknown_key_is_refused_and_told(receiver: Receiver, keys: KeyFolder) -> None:
    is_refused(receiver, keys.sender("stranger"), NotAdmitted, r"add stranger\.key to its allow-list")
    assert receiver.gate.refusals == (Refusal("127.0.0.1", "unknown key"),)


def test_another_receiver_s_key_is_refused_and_told(receiver: Receiver, keys: KeyFolder) -> None:
    wrong = keys.sender(receiver="data2")
    is_refused(receiver, wrong, WrongReceiver, r"another key than data2\.key")
    assert "key of another receiver, or damage on the way" in receiver.whys


def test_no_key_is_refused_and_told(receiver: Receiver) -> None:
    is_refused(receiver, None, NotAdmitted, "wants a key")
    assert receiver.whys <= {"no key", "handshake failed"}, "the latter where the sender saw it first"
    assert receiver.gate.refused


def test_a_receiver_without_keys_is_not_trusted(keys: KeyFolder) -> None:
    with receiving(None) as receiver:
        is_refused(receiver, keys.sender(), WrongReceiver, "no keys")


def test_after_every_refusal_the_allowed_ones_come_in(receiver: Receiver, keys: KeyFolder) -> None:
    is_refused(receiver, keys.sender("stranger"), NotAdmitted)
    is_refused(receiver, None, NotAdmitted)
    is_refused(receiver, keys.sender(receiver="data2"), WrongReceiver)
    assert receiver.gate.name_of(gets_through(receiver, keys.sender()).user) == "data1"
    assert receiver.gate.refused >= 3


def test_a_key_can_be_added_while_the_receiver_runs(receiver: Receiver, keys: KeyFolder) -> None:
    is_refused(receiver, keys.sender("stranger"), NotAdmitted)
    keys.allow("stranger")
    receiver.gate.reload()
    assert receiver.gate.name_of(gets_through(receiver, keys.sender("stranger")).user) == "stranger"


def test_a_key_can_be_removed_while_its_sender_is_connected(receiver: Receiver, keys: KeyFolder) -> None:
    with sending(receiver.endpoint, keys.sender("data2")) as sender:
        assert until(lambda: receiver.came, receiver, sender)
        user = receiver.came[-1].user
        keys.disallow("data2")
        assert receiver.gate.admits(user), "only reload() reads the list"
        receiver.gate.reload()
        assert not receiver.gate.admits(user)
        assert receiver.gate.name_of(user) == ""
    is_refused(receiver, keys.sender("data2"), NotAdmitted)


def test_an_allow_list_that_cannot_be_read_again_stays_as_it_was(receiver: Receiver, keys: KeyFolder) -> None:
    keys.disallow("data1")
    (keys.allowed / "data2.key").write_text("damaged")
    with pytest.raises(UsageError, match="who was allowed still is"):
        receiver.gate.reload()
    gets_through(receiver, keys.sender("data1"))


def test_a_receiver_that_begins_again_is_found_again(keys: KeyFolder) -> None:
    with receiving(keys.receiver) as receiver, sending(receiver.endpoint, keys.sender()) as sender:
        assert until(lambda: receiver.came, receiver, sender)
        receiver.socket.close()
        assert until(lambda: not sender.handshake.is_made, sender) is True
        with receiving(keys.receiver, receiver.endpoint) as again:
            assert until(lambda: sender.handshake.is_made, again, sender)
            sender.socket.send([b"more"])
            assert until(lambda: again.came, again, sender)


# What a sender may find in place of its receiver


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """Somebody who treats every connection so; the endpoint."""
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


def test_what_is_no_receiver_is_told(keys: KeyFolder) -> None:
    with (
        answering(http) as endpoint,
        sending(endpoint, keys.sender()) as sender,
        pytest.raises(WrongReceiver, match="no receiver"),
    ):
        until(lambda: False, sender)


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def hang_up(connection: socket.socket) -> None:
    connection.close()


def say_nothing(connection: socket.socket) -> None:
    pass


@pytest.mark.parametrize("answer", [hang_up, reset, say_nothing])
@pytest.mark.parametrize("with_keys", [True, False])
def test_a_tunnel_to_a_receiver_that_is_not_there_yet_is_no_verdict(
    keys: KeyFolder, answer: Callable[[socket.socket], None], with_keys: bool
) -> None:
    with (
        answering(answer) as endpoint,
        sending(endpoint, keys.sender() if with_keys else None) as sender,
    ):
        until(lambda: False, sender, patience=A_WHILE)
        assert not sender.handshake.is_made


# The authenticator fails


def test_an_authenticator_that_has_died_lets_nobody_in_and_is_told(
    receiver: Receiver, keys: KeyFolder
) -> None:
    gets_through(receiver, keys.sender())

    def broken(*_: object) -> str:
        raise MemoryError

    receiver.gate._handler._admit = broken  # type: ignore[union-attr]
    with sending(receiver.endpoint, keys.sender()) as sender:
        until(lambda: False, receiver, patience=A_WHILE)
        assert not sender.handshake.is_made
    with sending(receiver.endpoint, keys.sender()):
        until(lambda: False, receiver, patience=A_WHILE)
    assert len(receiver.came) == 1
    with pytest.raises(OperationError, match="MemoryError"):
        receiver.gate.check()


def test_an_authenticator_that_was_never_there_lets_nobody_in(
    keys: KeyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Absent(ZapHandler):
        def __init__(self, *_: object) -> None:
            self.failure = None

        def close(self) -> None:
            pass

    monkeypatch.setattr(gate_module, "ZapHandler", Absent)
    with receiving(keys.receiver) as receiver, sending(receiver.endpoint, keys.sender()):
        until(lambda: False, receiver, patience=A_WHILE)
        assert receiver.came == []
        assert receiver.gate.refused > 0


def test_an_authenticator_that_does_not_answer_lets_nobody_in(receiver: Receiver, keys: KeyFolder) -> None:
    asked, is_over = threading.Event(), threading.Event()

    def stuck(*_: object) -> str:
        asked.set()
        is_over.wait(PATIENCE)
        return "somebody"

    receiver.gate._handler._admit = stuck  # type: ignore[union-attr]
    try:
        with sending(receiver.endpoint, keys.sender()):
            assert until(asked.is_set, receiver)
            assert until(lambda: receiver.gate.refused, receiver), "HANDSHAKE_IVL has not ended it"
            assert receiver.came == []
    finally:
        is_over.set()


# Somebody between the two


FORTH, BACK = "to the receiver", "to the sender"


class Between:
    """Hands on what comes from a sender and from the receiver, after ``treat(data, way)`` has treated it."""

    def __init__(self, port: int) -> None:
        self.treat: Callable[[bytes, str], bytes] = lambda data, way: data
        self._port = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(PATIENCE)
        self.endpoint = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def flip(self, on: str) -> None:
        """From now on change the last bit of whatever goes that way."""
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
        assert until(lambda: receiver.came, receiver, sender)
        between.flip(on=FORTH)
        sender.socket.send([b"pixels"])
        assert until(lambda: receiver.gate.refused, receiver)
    assert len(receiver.came) == 1


def test_what_is_changed_on_its_way_to_the_sender_is_told(
    receiver: Receiver, keys: KeyFolder, between: Between
) -> None:
    with sending(between.endpoint, keys.sender()) as sender:
        assert until(lambda: receiver.came, receiver, sender)
        between.flip(on=BACK)
        receiver.socket.send([b"credit"], peer=receiver.came[0].peer)
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
        assert until(lambda: len(receiver.came) == 2, receiver, sender)
    assert receiver.came[1].parts[0].bytes == b"the first batch of pixels"
    assert b"CURVE" in seen
    assert b"pixels" not in seen


# What may knock at a receiver


def of_memory() -> int:
    """Bytes that this process has in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def knock(port: int, data: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), PATIENCE)
    with suppress(OSError):
        connection.sendall(data)
    return connection


KNOCKS = {
    "port scan": b"",
    "HTTP": b"GET / HTTP/1.1\r\nHost: training\r\n\r\n",
    "TLS": bytes.fromhex("16030100f8010000f40303") + bytes(range(240)),
    "ZMTP 1": b"\x01\x00\x06\x00batch" * 10,
    "ZMTP 2": SIGNATURE + b"\x01\x05\x00\x00" + b"\x00\x05batch" * 10,
    "no security": (SIGNATURE + b"\x03\x01NULL").ljust(64, b"\0") + b"\x04\x06\x05READY\x00\x05batch",
    "a command too early": CURVE_GREETING + b"\x04\x06\x05READY" + b"\x00\x05batch",
    "a HELLO of zeros": CURVE_GREETING + b"\x04\xc8\x05HELLO" + bytes(194),
}


@pytest.mark.parametrize("with_keys", [True, False])
def test_300_strange_connections_bring_nothing_and_cost_nothing(keys: KeyFolder, with_keys: bool) -> None:
    kinds = [data for kind, data in KNOCKS.items() if with_keys or kind != "no security"]
    rng = random.Random(1)
    with receiving(keys.receiver if with_keys else None) as receiver:
        knock(receiver.port, rng.randbytes(100)).close()
        until(lambda: receiver.gate.refused, receiver)
        before = of_memory()
        for number in range(300):
            data = rng.choice([*kinds, rng.randbytes(rng.randrange(1000))])
            connection = knock(receiver.port, data)
            connection.close()
            if number % 20 == 0:
                receiver.look()
        assert until(lambda: receiver.gate.refused >= 301, receiver)
        assert of_memory() - before < 16 << 20
        assert receiver.came == []
        assert len(receiver.gate.refusals) == REMEMBERED
        gets_through(receiver, keys.sender() if with_keys else None)


def test_a_handshake_that_never_ends_is_ended(receiver: Receiver) -> None:
    connection = knock(receiver.port, CURVE_GREETING)
    connection.settimeout(0)

    def is_dropped() -> bool:
        with suppress(BlockingIOError):
            try:
                connection.send(b"\x04")  # one byte at a time, for as long as it may
                return connection.recv(1000) == b""
            except ConnectionError:
                return True
        return False

    with connection:
        assert until(is_dropped, receiver)
        assert until(lambda: receiver.gate.refused, receiver)


@pytest.mark.parametrize("declared", [LIMIT + 1, 600 << 20, (1 << 63) - 1])
def test_an_oversized_handshake_is_not_taken_in(receiver: Receiver, declared: int) -> None:
    before = of_memory()
    sent = 0
    with knock(receiver.port, CURVE_GREETING + b"\x06" + struct.pack(">Q", declared)) as connection:
        with suppress(ConnectionError):
            while sent < 64 << 20:
                sent += connection.send(bytes(1 << 20))
        assert sent < 64 << 20, "the receiver has read on"
    assert until(lambda: receiver.gate.refused, receiver)
    assert of_memory() - before < 16 << 20


def test_endless_parts_of_who_was_not_let_in_are_not_taken_in(receiver: Receiver) -> None:
    before = of_memory()
    part = b"\x03" + struct.pack(">Q", 1 << 16) + bytes(1 << 16)
    sent = 0
    with knock(receiver.port, CURVE_GREETING) as connection, suppress(ConnectionError):
        while sent < 1000:
            connection.sendall(part)
            sent += 1
    assert sent < 1000, "the receiver has read on"
    assert of_memory() - before < 16 << 20
    assert receiver.came == []


FEW_FILES = """
import os, resource, sys
sys.path.insert(0, {tests!r})
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
from secured_ends import Receiver, ReceiverKeys, until

def is_full():
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        return True

receiver = Receiver(ReceiverKeys({secret!r}, {allowed!r}))
print(receiver.endpoint, flush=True)
print("full" if until(is_full, receiver) else "never full", flush=True)
until(lambda: receiver.came, receiver)
print(receiver.gate.name_of(receiver.came[0].user))
receiver.socket.close()
"""


def test_after_more_connections_than_there_are_file_descriptors_the_allowed_come_in(keys: KeyFolder) -> None:
    ours = keys.receiver
    program = FEW_FILES.format(
        tests=str(Path(__file__).parent), secret=str(ours.secret), allowed=str(ours.allowed)
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process, ExitStack() as ending:
        ending.callback(process.kill)
        assert process.stdout
        endpoint = process.stdout.readline().strip()
        with ExitStack() as flood:
            for _ in range(600):
                connection = flood.enter_context(socket.socket())
                connection.setblocking(False)
                connection.connect_ex(("127.0.0.1", int(endpoint.rpartition(":")[2])))
            # Where connecting is slow, the first are given up before the last are there, and it is never full.
            assert process.stdout.readline() in ("full\n", "never full\n")
        with sending(endpoint, keys.sender()) as sender:
            until(lambda: process.poll() is not None, sender)
        assert process.stdout.read() == "data1\n"


# What is kept, and what is left


def test_only_the_last_refusals_are_kept() -> None:
    gate = Gate(None)
    for _ in range(REMEMBERED * 3):
        gate.heard(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
        gate.heard(zmq.EVENT_DISCONNECTED, 7)

    assert gate.refused == REMEMBERED * 3
    assert gate.refusals == (Refusal("", "no key"),) * REMEMBERED


def test_a_peer_that_leaves_was_not_refused(receiver: Receiver, keys: KeyFolder) -> None:
    for _ in range(3):
        gets_through(receiver, keys.sender())
    until(lambda: False, receiver, patience=0.2)

    assert receiver.gate.refused == 0


def test_nothing_is_left_open(keys: KeyFolder) -> None:
    def open_and_close() -> None:
        with receiving(keys.receiver) as receiver:
            gets_through(receiver, keys.sender())
        receiver.gate.close()

    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    open_and_close()  # pyzmq opens what it keeps
    before = open_files()
    for _ in range(5):
        open_and_close()
    assert open_files() <= before
    assert not any(thread.name == "shardprep-zap" for thread in threading.enumerate())


def test_an_endpoint_that_is_taken_leaves_no_thread(receiver: Receiver, keys: KeyFolder) -> None:
    with pytest.raises(OperationError, match="in use"):
        Receiver(keys.receiver, receiver.endpoint)
    assert [thread.name for thread in threading.enumerate()].count("shardprep-zap") == 1


def test_keys_that_cannot_be_used_are_told_before_anything_is_opened(keys: KeyFolder) -> None:
    keys.folder.joinpath("train.key_secret").chmod(0o644)
    keys.folder.joinpath("data1.key_secret").chmod(0o644)

    with pytest.raises(UsageError, match="chmod 600"):
        Gate(keys.receiver)
    with pytest.raises(UsageError, match="chmod 600"):
        Handshake(ANY_PORT, keys.sender())
    assert stat.S_IMODE(keys.folder.joinpath("train.key_secret").stat().st_mode) == 0o644
