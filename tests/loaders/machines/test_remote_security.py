"""Admitted and refused peers: real sockets over loopback, and whatever may connect to them."""

import itertools
import resource
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from shardprep.formats.errors import OperationError, UsageError
from shardprep.loaders.flow.flow import Flow
from shardprep.loaders.machines import keys as admission, socket as frame_socket
from shardprep.loaders.remote import RemoteSource, SenderKeys, WrongReceiver, serve
from support.key_files import KeyFolder
from support.remote_ends import ANY_PORT, TIMEOUT_S, Tunnel, answering, serving
from support.waiting import until
from support.zmtp_peer import SIGNATURE, address_of, reset

CURVE_GREETING = (SIGNATURE + b"\x03\x01" + b"CURVE").ljust(64, b"\0")


def one_item() -> Flow:
    return Flow.from_iterable([b"the first batch of pixels"]).batch(1, as_list=True)


@pytest.fixture
def source(keys: KeyFolder) -> Iterator[RemoteSource]:
    with RemoteSource(ANY_PORT, keys=keys.receiver) as source:
        yield source


def gets_through(source: RemoteSource, keys: SenderKeys | None, endpoint: str | None = None) -> None:
    """Check that a sender is admitted."""
    with serving(one_item, endpoint or source.endpoint, keys=keys), source:
        assert list(source) == [[b"the first batch of pixels"]]


def is_refused(source: RemoteSource) -> bool:
    """Whether a peer was, now that the events of the socket are looked at."""
    source._reception.receive()
    return source.stats().not_admitted > 0


# Admission


def test_an_allow_list_that_cannot_be_read_stays_as_it_was(source: RemoteSource, keys: KeyFolder) -> None:
    keys.disallow("data1")
    (keys.allowed / "data2.key").write_text("damaged")
    with pytest.raises(UsageError, match="the old allow-list applies"):
        source.reload_keys()
    gets_through(source, keys.sender())


@pytest.mark.slow
def test_without_an_authenticator_all_are_refused(keys: KeyFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission.ReceiverAuth, "_authenticate", lambda _, handler: handler.close())
    monkeypatch.setattr(frame_socket, "HANDSHAKE_TIMEOUT_MS", 400)
    with RemoteSource(ANY_PORT, keys=keys.receiver) as source:
        with pytest.raises(OperationError):
            serve(one_item(), source.endpoint, keys=keys.sender(), patience=0.5)
        assert is_refused(source)


# Other processes in place of the receiver


def test_a_process_that_is_not_a_receiver_or_has_no_keys_is_reported(keys: KeyFolder) -> None:
    http = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n"
    with (
        answering(lambda connection: connection.sendall(http)) as endpoint,
        pytest.raises(WrongReceiver, match="not a receiver"),
    ):
        serve(one_item(), endpoint, keys=keys.sender())
    with RemoteSource(ANY_PORT) as source, pytest.raises(WrongReceiver, match="no keys"):
        serve(one_item(), source.endpoint, keys=keys.sender())


@pytest.mark.parametrize("answer", [socket.socket.close, reset])
@pytest.mark.parametrize("with_keys", [True, False])
def test_a_tunnel_is_waited_for_until_a_receiver_is_behind_it(
    keys: KeyFolder, answer: Callable[[socket.socket], None], with_keys: bool
) -> None:
    with RemoteSource(ANY_PORT, keys=keys.receiver if with_keys else None) as source:
        behind = itertools.chain([answer] * 3, itertools.repeat(Tunnel(source.endpoint)._pass_on))
        with answering(lambda connection: next(behind)(connection)) as endpoint:
            gets_through(source, keys.sender() if with_keys else None, endpoint)


# The wire


def test_no_text_is_seen_on_the_wire(source: RemoteSource, keys: KeyFolder) -> None:
    seen = bytearray()

    def overhear(data: bytes, is_back: bool) -> bytes:
        seen.extend(data)
        return data

    with Tunnel(source.endpoint) as tunnel:
        tunnel.treat = overhear
        gets_through(source, keys.sender(), tunnel.endpoint)
    assert b"CURVE" in seen
    assert b"pixels" not in seen


def of_memory() -> int:
    """Return the bytes that this process has in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("declared", [(1 << 20) + 100, 600 << 20, (1 << 63) - 1])
def test_an_oversized_handshake_is_not_read(source: RemoteSource, declared: int) -> None:
    before, sent = of_memory(), 0
    with socket.create_connection(address_of(source.endpoint), TIMEOUT_S) as connection:
        with suppress(ConnectionError):
            connection.sendall(CURVE_GREETING + b"\x06" + struct.pack(">Q", declared))
            while sent < 64 << 20:
                sent += connection.send(bytes(1 << 20))
        assert sent < 64 << 20, "the receiver has read on"
    until(lambda: is_refused(source))
    assert of_memory() - before < 16 << 20


def test_an_endpoint_that_is_taken_leaves_no_thread(source: RemoteSource, keys: KeyFolder) -> None:
    with pytest.raises(OperationError, match="in use"):
        RemoteSource(source.endpoint, keys=keys.receiver)

    until(lambda: [each.name for each in threading.enumerate()].count("shardprep-zap") == 1)
