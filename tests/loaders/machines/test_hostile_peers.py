"""Peers that try to abort, block or fill a receiver or a sender, and those that vanish."""

import itertools
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from shardprep.formats.errors import OperationError
from shardprep.loaders.flow.flow import Flow
from shardprep.loaders.frames import ReceiverGone, send_batches
from shardprep.loaders.machines import socket as frame_socket
from shardprep.loaders.machines.codec import FrameKind, pack_note, read_head
from shardprep.loaders.machines.ledger import StepLease
from shardprep.loaders.machines.wire import VERSION, pack_lease
from shardprep.loaders.remote import Refused, RemoteSource, serve
from support.remote_ends import TIMEOUT_S, python
from support.scripts import line_of
from support.waiting import until
from support.zmtp_peer import (
    MORE,
    PING,
    ZMTP_2_ADDRESS,
    ZMTP_2_GREETING,
    address_of,
    connected,
    frame,
    read_frame,
    reset,
    shake_hands,
)

# A process that has a receiver, does something else while a line is awaited, and then draws for a moment. One
# that connects to an endpoint draws at once.
TRAINING = """
import sys, threading
from shardprep.formats.errors import UsageError
from shardprep.loaders.frames import FrameReceiver
from shardprep.loaders.remote import RemoteSource

kind, *endpoint = sys.argv[1:]
if endpoint:
    receiver = FrameReceiver(*endpoint, bind=False)
else:
    receiver = {"frames": FrameReceiver, "remote": RemoteSource}[kind]("tcp://127.0.0.1:*")
    print(receiver.endpoint, flush=True)
    sys.stdin.readline()
threading.Timer(4 if endpoint else 0.5, receiver.close).start()
try:
    list(receiver)
except UsageError:
    print("closed", flush=True)
"""

CLOSING = """
import sys
from shardprep.loaders.frames import FrameReceiver

for _ in range(4):
    with FrameReceiver("tcp://127.0.0.1:*") as receiver:
        print(receiver.endpoint, flush=True)
        sys.stdin.readline()
"""


# Against receivers


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["frames", "remote"])
def test_a_peer_that_pings_among_a_flood_and_resets_does_not_abort_a_training(kind: str) -> None:
    with python("-c", TRAINING, kind) as process:
        with connected(line_of(process)) as peer:
            peer.sendall((frame(b"x") * 100 + PING) * 10)
            time.sleep(0.2)
            reset(peer)
        said, complained = process.communicate("\n", timeout=TIMEOUT_S)
        assert (said, process.returncode) == ("closed\n", 0), complained


@pytest.mark.torture
def test_handshakes_of_old_protocols_do_not_abort_a_receiver_that_closes() -> None:
    with python("-c", CLOSING) as process:
        for _ in range(4):
            address = address_of(line_of(process))
            peers = [socket.create_connection(address) for _ in range(300)]
            for peer in peers:
                peer.sendall(ZMTP_2_GREETING)
            time.sleep(0.1)
            print(file=process.stdin, flush=True)
            for peer in peers:
                with suppress(OSError), peer:
                    peer.sendall(ZMTP_2_ADDRESS)
        assert process.wait(TIMEOUT_S) == 0


@pytest.mark.torture
def test_connections_that_end_within_messages_do_not_abort_a_receiver_that_connects() -> None:
    message = frame(b"x", MORE) * 500 + frame(b"x")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(1)
        with python("-c", TRAINING, "frames", f"tcp://127.0.0.1:{listener.getsockname()[1]}") as process:
            while process.poll() is None:
                with suppress(OSError, EOFError):
                    peer, _ = listener.accept()
                    shake_hands(peer, b"DEALER")
                    peer.sendall(message * 15)
                    reset(peer)
            assert process.communicate() == ("closed\n", "")


# Peers that vanish


@pytest.fixture
def other_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[str]]]:
    """How to run a program in a network of its own, as a command; ``"down"`` cuts its cable."""
    if os.geteuid() != 0 or subprocess.run(["ip", "netns"], capture_output=True, check=False).returncode:
        pytest.skip("needs root and ip, for a network that can be cut")
    monkeypatch.setattr(frame_socket, "VANISHED_S", 3)
    monkeypatch.setattr(frame_socket, "PROBE_INTERVAL_S", 1)
    name = f"prep{os.getpid()}"
    net = f"10.{os.getpid() % 250}.{os.getpid() // 250 % 250}"

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    ip("netns", "add", name)
    try:
        ip("link", "add", f"v{name}", "type", "veth", "peer", "name", "cable", "netns", name)
        ip("addr", "add", f"{net}.1/24", "dev", f"v{name}")
        ip("link", "set", f"v{name}", "up")
        ip("-n", name, "addr", "add", f"{net}.2/24", "dev", "cable")
        ip("-n", name, "link", "set", "cable", "up")

        def machine(what: str, *words: str) -> list[str]:
            if what == "down":
                ip("-n", name, "link", "set", "cable", "down")
            if what == "run":
                return ["ip", "netns", "exec", name, sys.executable, "-c", *words]
            return [f"{net}.1", f"{net}.2"]

        yield machine
    finally:
        subprocess.run(["ip", "link", "del", f"v{name}"], check=False)
        ip("netns", "del", name)


STUCK = """
import sys, time
from shardprep.loaders.flow.flow import Flow
from shardprep.loaders.frames import FrameReceiver
from shardprep.loaders.remote import serve

def item(number):
    if number > 2:
        time.sleep(3600)
    return [b"item"]

kind, endpoint = sys.argv[1:]
if kind == "receiver":
    receiver = FrameReceiver(endpoint)
    print("listens", flush=True)
    for _ in receiver:
        time.sleep(3600)
serve(Flow.from_iterable(range(9)).map(item), endpoint, insecure=True)
"""


@pytest.mark.torture
@pytest.mark.filterwarnings("ignore::shardprep.loaders.machines.keys.PlaintextWire")
@pytest.mark.parametrize("kind", ["remote", "receiver"])
def test_a_machine_that_vanishes_is_noticed(kind: str, other_machine: Callable[..., list[str]]) -> None:
    here, there = other_machine("addresses")

    def run(endpoint: str) -> subprocess.Popen[str]:
        command = other_machine("run", STUCK, kind, endpoint)
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    if kind == "remote":
        with RemoteSource(f"tcp://{here}:*", insecure=True) as source, run(source.endpoint) as process:
            drawn = iter(source)
            assert len([next(drawn) for _ in range(3)]) == 3
            other_machine("down")
            with ThreadPoolExecutor(1) as pool:
                pool.submit(next, drawn)
                until(lambda: not source.stats().senders)
                source.close()
            process.kill()
    else:
        with run(endpoint := f"tcp://{there}:7777") as process:
            assert line_of(process) == "listens"
            threading.Timer(1, other_machine, ["down"]).start()
            with pytest.raises(ReceiverGone):
                send_batches(itertools.repeat([b"item"]), endpoint)
            process.kill()


# Against senders


@pytest.mark.slow
def test_a_sender_tries_again_soon_where_its_packets_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_socket, "HANDSHAKE_TIMEOUT_MS", 100)
    connections, ports, over = Path("/proc/net/tcp"), set[str](), threading.Event()

    def watch() -> None:
        while not over.wait(0.01):
            ports.update(re.findall(f":(....) 0100007F:{port:04X} 02", connections.read_text()))

    with socket.create_server(("", 0), backlog=0) as full, socket.create_connection(full.getsockname()):
        port = full.getsockname()[1]
        with ThreadPoolExecutor(1) as pool, ExitStack() as end:
            end.callback(over.set)
            pool.submit(watch)
            with pytest.raises(OperationError, match="no receiver was there"):
                serve(Flow.from_iterable(range(9)), f"tcp://127.0.0.1:{port}", patience=2)
    assert len(ports) > 1  # of attempts to connect


@contextmanager
def hostile() -> Iterator[tuple[str, Callable[[], socket.socket]]]:
    """A place where a receiver should listen, and a function that takes a sender's connection."""
    welcome = pack_note(FrameKind.WELCOME, VERSION, session=7, limit=1 << 40)

    def accept() -> socket.socket:
        connection, _ = listener.accept()
        shake_hands(connection, b"ROUTER")
        read_frame(connection)  # HELLO
        connection.sendall(frame(bytes(welcome[0])))
        return connection

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(TIMEOUT_S)
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}", accept


def lease(number: int, start: int, stop: int) -> bytes:
    return frame(bytes(pack_lease(7, StepLease(number, 0, start, stop))[0]))


STEPS = 1000
ABSURD = {"an id": lease(2**64 - 1, 0, 1), "a step": lease(1, 2**62, 2**62 + 1)}
ABSURD |= {"beyond the end": lease(1, STEPS - 1, STEPS + 1), "many buffers": frame(b"", MORE) * 10_000}


@pytest.mark.parametrize("absurd", ABSURD.values(), ids=ABSURD.keys())
def test_an_absurd_lease_does_no_harm_to_a_sender(absurd: bytes) -> None:
    with hostile() as (endpoint, accept), ThreadPoolExecutor(1) as pool:
        sent = pool.submit(serve, Flow.from_iterable(range(STEPS)), endpoint, patience=TIMEOUT_S)
        with accept() as connection:
            connection.sendall(absurd + frame(b"") + lease(2, 7, 8))
            assert read_head(read_frame(connection)).number == 7
            connection.sendall(frame(bytes(pack_note(FrameKind.STOP, text="enough")[0])))
            with pytest.raises(Refused, match="enough"):
                sent.result(TIMEOUT_S)


def test_a_receiver_that_closes_right_after_the_handshake_is_waited_for() -> None:
    with ThreadPoolExecutor(1) as pool:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            endpoint = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
            slow = {"patience": 0.5, "report": lambda stats: time.sleep(0.3)}  # sees both events at once
            sent = pool.submit(serve, Flow.from_iterable(range(STEPS)), endpoint, **slow)
            with listener.accept()[0] as connection:
                shake_hands(connection, b"ROUTER")
        with pytest.raises(OperationError, match="no receiver was there"):
            sent.result(TIMEOUT_S)
