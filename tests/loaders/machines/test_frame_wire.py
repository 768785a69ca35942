"""Senders and receivers in processes and threads, and the faults that may occur between them."""

import random
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import reduce
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from shardprep.formats.errors import OperationError, UsageError
from shardprep.loaders.frames import FrameReceiver, ReceiverGone, SenderFailed, send_batches
from shardprep.loaders.machines import reception
from shardprep.loaders.machines.codec import MAX_DEPTH, FrameKind, pack_batch, pack_note, read_head
from shardprep.loaders.machines.ledger import ShareLedger, StepRef
from shardprep.loaders.machines.wire import UNSHARED, VERSION, Hello, pack_step
from support.remote_ends import ANY_PORT, TIMEOUT_S, python
from support.scripts import line_of
from support.waiting import interrupt
from support.zmtp_peer import COMMAND, GREETING, frame

SENDER = """
import sys, time
import numpy as np
from shardprep.loaders.machines.frames import send_batches

endpoint, first, count, pause_at, epochs = sys.argv[1], *map(int, sys.argv[2:])

def batches():
    for number in range(first, first + count):
        if number == pause_at:
            time.sleep(3600)
        yield np.full((100, 1000), number), number

print("ready", flush=True)
for _ in range(epochs):
    print(send_batches(batches, endpoint), flush=True)
"""

RECEIVER = """
import sys
from shardprep.loaders.machines.frames import FrameReceiver

with FrameReceiver("tcp://127.0.0.1:*") as receiver:
    print(receiver.endpoint, flush=True)
    for batch in receiver:
        print("batch", flush=True)
"""


def numbers(count: int, first: int = 0) -> list[Any]:
    return [(np.full((2, 3), number), number) for number in range(first, first + count)]


def taken(batches: Any) -> list[int]:
    return [int(number) for _, number in batches]


def sender(endpoint: str, *, first: int = 0, count: int = 5, pause_at: int = -1, epochs: int = 1) -> Any:
    return python("-c", SENDER, endpoint, first, count, pause_at, epochs)


@contextmanager
def in_thread(call: Callable[..., Any], *given: Any, **named: Any) -> Iterator[Any]:
    """The future of a call in a thread, which has ended at the end."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(call, *given, **named)


@pytest.fixture
def receiver() -> Iterator[FrameReceiver]:
    with FrameReceiver(ANY_PORT) as receiver:
        yield receiver


@pytest.fixture
def peer(receiver: FrameReceiver) -> Iterator[zmq.Socket[bytes]]:
    """A sender that the test plays."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.setsockopt(zmq.LINGER, 1000)
        peer.setsockopt(zmq.RCVTIMEO, int(TIMEOUT_S * 1000))
        peer.connect(receiver.endpoint)
        yield peer


def kind_of(answer: list[bytes]) -> FrameKind:
    return read_head(answer[0]).kind


def joined(peer: zmq.Socket[bytes]) -> StepRef:
    """Join the epoch of a receiver that iterates; return the peer's first step."""
    peer.send_multipart(Hello("peer", "peer", UNSHARED, 12).pack())
    session = read_head(peer.recv_multipart()[0]).description["session"]
    lease = read_head(peer.recv_multipart()[0])
    return StepRef(session, lease.number, lease.description["pass_number"], 0)


def test_a_receiver_that_lacks_a_sender_logs_so_once(
    receiver: FrameReceiver, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reception, "NO_SENDER_TIMEOUT_S", 0.01)
    with in_thread(taken, receiver) as came:
        while not caplog.messages:
            time.sleep(0.01)
        send_batches(numbers(5), receiver.endpoint)
        assert came.result(TIMEOUT_S) == list(range(5))
    (said,) = caplog.messages
    assert "0 of 1 senders have joined" in said


def test_without_a_receiver_a_sender_waits_as_long_as_it_was_told() -> None:
    with pytest.raises(OperationError, match="no receiver"):
        send_batches(numbers(1), "tcp://127.0.0.1:9", timeout=0.2)


def test_a_sender_may_be_the_one_that_binds(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/frames"

    def batches() -> Iterator[Any]:
        yield from numbers(2)
        with suppress(ConnectionError), socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(f"{tmp_path}/frames")
            stranger.sendall(GREETING + frame(b"\x05WRONG", COMMAND))
            stranger.makefile("rb").read()  # until it is refused
        yield from numbers(3, 2)

    with (
        FrameReceiver(endpoint, bind=False) as receiver,
        in_thread(lambda: [send_batches(batches, endpoint, bind=True) for _ in range(2)]) as sent,
    ):
        assert [taken(receiver), taken(receiver)] == [[0, 1, 2, 3, 4]] * 2
        assert sent.result(TIMEOUT_S) == [5, 5]


@pytest.mark.slow
def test_two_senders_share_epochs_also_after_ctrl_c_at_the_end_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (
        FrameReceiver(ANY_PORT, senders=2) as receiver,
        sender(receiver.endpoint, first=0, count=10, epochs=9),
        sender(receiver.endpoint, first=10, count=5, epochs=9),
    ):
        interrupt(monkeypatch, ShareLedger, "record_end")
        with pytest.raises(KeyboardInterrupt):
            list(receiver)
        for _ in range(2):
            came = taken(receiver)
            assert sorted(came) == list(range(15))
            assert [n for n in came if n < 10] == list(range(10))


@pytest.mark.slow
def test_a_killed_sender_is_reported_and_another_starts_from_the_beginning(receiver: FrameReceiver) -> None:
    with sender(receiver.endpoint, count=10, pause_at=6) as process:
        epoch = iter(receiver)
        assert taken([next(epoch) for _ in range(6)]) == list(range(6))
        process.kill()
        with pytest.raises(SenderFailed, match="disconnected after 6 batches"):
            next(epoch)
    with sender(receiver.endpoint, count=10):
        assert taken(receiver) == list(range(10))


def test_a_killed_receiver_raises_in_its_sender() -> None:
    with python("-c", RECEIVER) as process:
        endpoint = line_of(process)

        def batches() -> Iterator[Any]:
            yield from numbers(1)
            assert line_of(process) == "batch"
            process.kill()
            process.wait()
            yield from numbers(10)

        with pytest.raises(ReceiverGone):
            send_batches(batches, endpoint)


def test_a_receiver_that_is_closed_while_a_fork_of_its_process_lives_raises_in_its_sender() -> None:
    with (
        FrameReceiver(ANY_PORT) as receiver,
        in_thread(send_batches, numbers(100), receiver.endpoint) as sent,
    ):
        epoch = iter(receiver)
        next(epoch)
        fork = get_context("fork").Process(target=time.sleep, args=[3600], daemon=True)
        fork.start()
        receiver.close()
        try:
            with pytest.raises(ReceiverGone):
                sent.result(TIMEOUT_S)
        finally:
            fork.kill()
            fork.join()


def test_a_batch_that_cannot_be_sent_raises_on_both_sides() -> None:
    deep = reduce(lambda inner, _: (inner,), range(MAX_DEPTH), np.zeros(1000, np.uint8))
    with (
        FrameReceiver(ANY_PORT, limit_bytes=np.int64(1000)) as receiver,
        in_thread(send_batches, [deep, np.zeros(1001, np.uint8)], receiver.endpoint) as sent,
    ):
        epoch = iter(receiver)
        assert repr(next(epoch)) == repr(deep)
        with pytest.raises(SenderFailed, match="1,001 bytes"):
            next(epoch)
        with pytest.raises(UsageError, match="1,001 bytes"):
            sent.result(TIMEOUT_S)


def test_garbage_on_the_line_reaches_no_epoch(receiver: FrameReceiver) -> None:
    chance = random.Random(1)
    no_handshake = b"\x01\x00" + b"".join(b"\x09\x00" + chance.randbytes(8) for _ in range(5))  # ZMTP/1
    known = [no_handshake, b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + bytes(300)]
    litter = [*known, *map(chance.randbytes, range(1, 200, 9))]
    address = "127.0.0.1", int(receiver.endpoint.rpartition(":")[2])
    with ExitStack() as stack:
        for text in litter * 2:
            stack.enter_context(socket.create_connection(address)).sendall(text)
        with sender(receiver.endpoint, count=20):
            assert taken(receiver) == list(range(20))
    assert receiver.rejected == 0  # it was refused before there was a message


def test_frames_of_a_stranger_are_dropped(receiver: FrameReceiver, peer: zmq.Socket[bytes]) -> None:
    notes = [pack_note(FrameKind.END), pack_note(FrameKind.ERROR, text="me")]
    no_hello = pack_note(FrameKind.HELLO, VERSION, name="")
    for parts in (pack_batch(np.zeros(3)), *notes, [b""], no_hello, [bytes(10)] * 10_000):
        peer.send_multipart(parts)
    with in_thread(send_batches, numbers(3), receiver.endpoint):
        assert taken(receiver) == [0, 1, 2]
        while receiver.rejected < 6:
            with in_thread(send_batches, numbers(1), receiver.endpoint):
                taken(receiver)
    assert receiver.rejected == 6


def test_an_end_raises_unless_all_batches_arrived(receiver: FrameReceiver, peer: zmq.Socket[bytes]) -> None:
    epoch = iter(receiver)
    with in_thread(lambda: [next(epoch), next(epoch)]) as came:
        first = joined(peer)
        for number in (0, 0, 1, 2):
            *parts, last = pack_batch(numbers(3)[number], number)
            peer.send_multipart([*parts, bytes(len(last)) if number == 2 else last])
        peer.send_multipart(pack_step(FrameKind.END, first._replace(step=3)))
        assert taken(came.result(TIMEOUT_S)) == [0, 1]
    with pytest.raises(SenderFailed, match="has sent 3 batches, but 2 arrived"):
        next(epoch)
    assert receiver.rejected == 2
    while kind_of(answer := peer.recv_multipart()) != FrameKind.DONE:
        assert kind_of(answer) in (FrameKind.LEASE, FrameKind.CREDIT)


def test_why_a_sender_was_dropped_is_raised(receiver: FrameReceiver, peer: zmq.Socket[bytes]) -> None:
    with in_thread(list, receiver) as came:
        joined(peer)
        for parts in (pack_batch(numbers(1)), *[[b""]] * reception.MAX_BAD_FRAMES):
            peer.send_multipart(parts)
        with pytest.raises(SenderFailed, match="bad frames"):
            came.result(TIMEOUT_S)


def test_an_epoch_is_over_once_its_end_arrives(
    receiver: FrameReceiver, peer: zmq.Socket[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reception, "POLL_INTERVAL_S", 2 * TIMEOUT_S)
    with in_thread(list, receiver) as received:
        peer.send_multipart(pack_step(FrameKind.END, joined(peer)))
        assert kind_of(peer.recv_multipart()) is FrameKind.DONE
        assert received.result(TIMEOUT_S) == []  # while the peer stays connected


def test_beginning_again_ends_the_iteration_before(receiver: FrameReceiver) -> None:
    with in_thread(lambda: [send_batches(numbers(9), receiver.endpoint) for _ in range(2)]) as sent:
        first = iter(receiver)
        next(first)
        assert taken(receiver) == list(range(9))
        with pytest.raises(UsageError, match="another iteration"):
            next(first)
        assert sent.result(TIMEOUT_S)[1] == 9


@pytest.mark.torture
@pytest.mark.parametrize("iterating", [False, True])
def test_ctrl_c_ends_a_sender_that_waits(receiver: FrameReceiver, iterating: bool) -> None:
    with sender(receiver.endpoint, count=100) as process:
        assert line_of(process) == "ready"
        if iterating:
            next(epoch := iter(receiver))
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=TIMEOUT_S)
        if iterating:
            with pytest.raises(SenderFailed, match="KeyboardInterrupt"):
                list(epoch)

    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in errors
