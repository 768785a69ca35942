"""Senders and receivers in processes and threads, and the faults that may occur between them."""

import gc
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from shardprep.formats.errors import OperationError, UsageError
from shardprep.loaders.machines import frames as frame_receiver
from shardprep.loaders.machines.codec import FrameKind, pack_batch, pack_note, read_head
from shardprep.loaders.machines.frames import FrameReceiver, ReceiverGone, SenderFailed, send_batches
from shardprep.loaders.machines.socket import FrameSocket
from support.sampling import torture_except

ANY_PORT = "tcp://127.0.0.1:*"
TIMEOUT_S = 60.0

SENDER = """
import sys, time
import numpy as np
from shardprep.loaders.machines.frames import send_batches

endpoint, first, count, pause_at, epochs = sys.argv[1], *map(int, sys.argv[2:])

def batches():
    for number in range(first, first + count):
        if number == pause_at:
            print("paused", flush=True)
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


@contextmanager
def program(text: str, *words: object) -> Iterator[subprocess.Popen[str]]:
    """A running process, which is killed at the end."""
    command = [sys.executable, "-c", text, *map(str, words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def sender(endpoint: str, *, first: int = 0, count: int = 5, pause_at: int = -1, epochs: int = 1) -> Any:
    return program(SENDER, endpoint, first, count, pause_at, epochs)


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().strip()


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


# Epochs


def test_epochs_of_another_process_arrive_exactly_once(receiver: FrameReceiver) -> None:
    with sender(receiver.endpoint, count=20, epochs=3) as process:
        for _ in range(3):
            assert taken(receiver) == list(range(20))
        assert process.communicate(timeout=TIMEOUT_S) == ("ready\n" + "20\n" * 3, "")
    assert receiver.rejected == 0


def test_large_batches_of_all_forms_arrive(tmp_path: Path) -> None:
    batch = {"image": np.random.default_rng(1).random((64, 100, 100)), "names": [b"a" * 100_000, b""]}
    with (
        FrameReceiver(f"ipc://{tmp_path}/frames") as receiver,
        in_thread(send_batches, [batch] * 3, receiver.endpoint),
    ):
        for came in receiver:
            assert np.array_equal(came["image"], batch["image"])
            assert came["names"] == batch["names"]


def test_a_sender_may_start_before_its_receiver() -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        endpoint = f"tcp://127.0.0.1:{reserved.getsockname()[1]}"
    with in_thread(send_batches, numbers(5), endpoint) as sent:
        time.sleep(0.3)
        assert not sent.done()
        with FrameReceiver(endpoint) as receiver:
            assert taken(receiver) == [0, 1, 2, 3, 4]
        assert sent.result(TIMEOUT_S) == 5


def test_without_a_receiver_a_sender_waits_as_long_as_it_was_told() -> None:
    with pytest.raises(OperationError, match="no receiver"):
        send_batches(numbers(1), "tcp://127.0.0.1:9", timeout=0.2)


def test_a_sender_may_be_the_one_that_binds(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/frames"

    with (
        FrameReceiver(endpoint, bind=False) as receiver,
        in_thread(lambda: [send_batches(numbers(5), endpoint, bind=True) for _ in range(2)]) as sent,
    ):
        assert [taken(receiver), taken(receiver)] == [[0, 1, 2, 3, 4]] * 2
        assert sent.result(TIMEOUT_S) == [5, 5]


@pytest.mark.torture
def test_two_senders_share_an_epoch() -> None:
    with (
        FrameReceiver(ANY_PORT, senders=2) as receiver,
        sender(receiver.endpoint, first=0, count=10, epochs=2) as one,
        sender(receiver.endpoint, first=10, count=5, epochs=2) as other,
    ):
        for _ in range(2):
            came = taken(receiver)
            assert sorted(came) == list(range(15))
            assert [n for n in came if n < 10] == list(range(10))
        assert one.wait(TIMEOUT_S) == other.wait(TIMEOUT_S) == 0


def test_a_fast_sender_s_next_epoch_is_not_taken_for_a_slow_sender_s_first() -> None:
    def twice(first: int, name: str, begin: threading.Event) -> None:
        begin.wait(TIMEOUT_S)
        for epoch in range(2):
            send_batches(numbers(3, first + 10 * epoch), receiver.endpoint, name=name)

    now, later = threading.Event(), threading.Event()
    now.set()
    with (
        FrameReceiver(ANY_PORT, senders=2) as receiver,
        in_thread(twice, 0, "fast", now),
        in_thread(twice, 100, "slow", later),
    ):
        epoch = iter(receiver)
        first = taken([next(epoch) for _ in range(3)])
        threading.Timer(0.2, later.set).start()
        assert first + sorted(taken(epoch)) == [0, 1, 2, 100, 101, 102]
        assert sorted(taken(receiver)) == [10, 11, 12, 110, 111, 112]


def test_a_sender_returns_only_when_its_end_was_acknowledged(receiver: FrameReceiver) -> None:
    with in_thread(send_batches, numbers(2), receiver.endpoint) as sent:
        epoch = iter(receiver)
        assert taken([next(epoch), next(epoch)]) == [0, 1]
        time.sleep(0.2)
        assert not sent.done()
        assert next(epoch, None) is None
        assert sent.result(TIMEOUT_S) == 2


@pytest.mark.slow
def test_a_slow_receiver_holds_the_sender_up() -> None:
    asked = 0

    def batches() -> Iterator[Any]:
        nonlocal asked
        for batch in numbers(50):
            asked += 1
            yield batch

    with (
        FrameReceiver(ANY_PORT, high_water_mark=3) as receiver,
        in_thread(send_batches, batches, receiver.endpoint),
    ):
        for number, _ in enumerate(receiver, start=1):
            time.sleep(0.01)
            assert asked <= number + 3 + 1


@pytest.mark.slow
def test_memory_that_the_source_uses_again_is_not_sent_twice(receiver: FrameReceiver) -> None:
    def batches() -> Iterator[Any]:
        memory = np.empty(500_000)
        for number in range(20):
            memory[:] = number
            yield memory

    with in_thread(send_batches, batches, receiver.endpoint):
        assert [set(batch.tolist()) for batch in receiver] == [{float(number)} for number in range(20)]


def test_leaving_an_epoch_stops_its_sender_and_the_next_one_is_whole(
    receiver: FrameReceiver,
) -> None:
    with in_thread(send_batches, numbers(100), receiver.endpoint) as sent:
        for _, number in receiver:
            if number == 3:
                break
        assert 4 <= sent.result(TIMEOUT_S) < 100
    with in_thread(send_batches, numbers(3, first=1000), receiver.endpoint):
        assert taken(receiver) == [1000, 1001, 1002]
    assert receiver.rejected == 0


# Failures


@pytest.mark.slow
def test_a_killed_sender_is_reported_and_another_one_starts_from_the_beginning(
    receiver: FrameReceiver,
) -> None:
    with sender(receiver.endpoint, count=10, pause_at=6) as process:
        epoch = iter(receiver)
        assert taken([next(epoch) for _ in range(6)]) == list(range(6))
        process.kill()
        with pytest.raises(SenderFailed, match="disconnected after 6 batches"):
            next(epoch)
    with sender(receiver.endpoint, count=10):
        assert taken(receiver) == list(range(10))


@pytest.mark.torture
def test_a_killed_sender_that_bound_is_reported(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/frames"
    binding = SENDER.replace("(batches, endpoint)", "(batches, endpoint, bind=True)")
    with FrameReceiver(endpoint, bind=False) as receiver, program(binding, endpoint, 0, 5, 2, 1) as process:
        epoch = iter(receiver)
        assert taken([next(epoch), next(epoch)]) == [0, 1]
        process.kill()
        with pytest.raises(SenderFailed, match="disconnected after 2 batches"):
            next(epoch)


@pytest.mark.torture
def test_close_works_while_the_receiver_waits_for_a_killed_sender(receiver: FrameReceiver) -> None:
    with sender(receiver.endpoint, pause_at=1) as process:
        epoch = iter(receiver)
        next(epoch)
        process.kill()
        receiver.close()
        with pytest.raises(UsageError, match="closed"):
            next(epoch)


@pytest.mark.torture
def test_a_sender_killed_before_its_first_batch_is_replaced(receiver: FrameReceiver) -> None:
    with in_thread(taken, receiver) as came:
        with sender(receiver.endpoint, pause_at=0) as process:
            assert [line_of(process), line_of(process)] == ["ready", "paused"]
        with sender(receiver.endpoint):
            assert came.result(TIMEOUT_S) == [0, 1, 2, 3, 4]


@pytest.mark.torture
def test_a_sender_killed_while_it_waits_is_forgotten(receiver: FrameReceiver) -> None:
    with sender(receiver.endpoint) as process:
        assert line_of(process) == "ready"
        time.sleep(0.5)
        process.kill()
        process.wait()
    with in_thread(taken, receiver) as came, sender(receiver.endpoint):
        assert came.result(TIMEOUT_S) == [0, 1, 2, 3, 4]


def test_a_killed_receiver_raises_in_its_sender() -> None:
    with program(RECEIVER) as process:
        endpoint = line_of(process)

        def batches() -> Iterator[Any]:
            yield from numbers(1)
            assert line_of(process) == "batch"
            process.kill()
            process.wait()
            yield from numbers(10)

        with pytest.raises(ReceiverGone):
            send_batches(batches, endpoint)


def test_a_closed_receiver_raises_in_its_senders() -> None:
    with FrameReceiver(ANY_PORT) as receiver, ExitStack() as stack:
        sent = [
            stack.enter_context(in_thread(send_batches, numbers(99), receiver.endpoint, name=name))
            for name in "ab"
        ]
        epoch = iter(receiver)
        next(epoch)
        time.sleep(0.2)  # a sender that is not connected yet would wait for the next receiver
        receiver.close()
        for future in sent:
            with pytest.raises(ReceiverGone):
                future.result(TIMEOUT_S)


class OwnError(Exception):
    pass


def test_an_error_of_the_source_is_raised_on_both_sides(receiver: FrameReceiver) -> None:
    def batches() -> Iterator[Any]:
        yield from numbers(2)
        raise OwnError("the disk is wet")

    with in_thread(send_batches, batches, receiver.endpoint) as sent:
        epoch = iter(receiver)
        assert taken([next(epoch), next(epoch)]) == [0, 1]
        with pytest.raises(SenderFailed, match="OwnError: the disk is wet"):
            next(epoch)
        with pytest.raises(OwnError):
            sent.result(TIMEOUT_S)
    with in_thread(send_batches, numbers(3), receiver.endpoint):
        assert taken(receiver) == [0, 1, 2]


@pytest.mark.parametrize(
    ("batch", "says"), [(np.zeros(1001, np.uint8), "1,001 bytes"), ("text", "cannot be sent")]
)
def test_a_batch_that_cannot_be_sent_raises_on_both_sides(batch: Any, says: str) -> None:
    with (
        FrameReceiver(ANY_PORT, limit_bytes=1000) as receiver,
        in_thread(send_batches, [batch], receiver.endpoint) as sent,
    ):
        with pytest.raises(SenderFailed, match=says):
            next(iter(receiver))
        with pytest.raises(UsageError, match=says):
            sent.result(TIMEOUT_S)


# Other peers


def test_garbage_on_the_line_reaches_no_epoch(receiver: FrameReceiver) -> None:
    chance = random.Random(1)
    legacy = b"\x01\x00" + b"".join(
        b"\x09\x00" + chance.randbytes(8) for _ in range(5)
    )  # ZMTP/1: no handshake
    litter = [
        legacy,
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01" + bytes(300),
        *map(chance.randbytes, range(1, 200, 9)),
    ]
    address = "127.0.0.1", int(receiver.endpoint.rpartition(":")[2])
    with ExitStack() as stack:
        for text in litter * 2:
            stack.enter_context(socket.create_connection(address)).sendall(text)
        with sender(receiver.endpoint, count=20):
            assert taken(receiver) == list(range(20))
    assert receiver.rejected == 0  # it was refused before there was a message


def test_frames_of_a_peer_that_was_not_admitted_are_dropped(
    receiver: FrameReceiver, peer: zmq.Socket[bytes]
) -> None:
    for parts in (
        pack_batch(np.zeros(3)),
        pack_note(FrameKind.END),
        pack_note(FrameKind.ERROR, text="me"),
        [b""],
    ):
        peer.send_multipart(parts)
    peer.send_multipart(pack_note(FrameKind.HELLO, name=""))
    peer.send_multipart([bytes(10)] * 10_000)
    with in_thread(send_batches, numbers(3), receiver.endpoint):
        assert taken(receiver) == [0, 1, 2]
        while receiver.rejected < 6:
            with in_thread(send_batches, numbers(1), receiver.endpoint):
                taken(receiver)
    assert receiver.rejected == 6


def test_a_repeated_batch_is_dropped_and_a_missing_one_raises(
    receiver: FrameReceiver, peer: zmq.Socket[bytes]
) -> None:
    peer.send_multipart(pack_note(FrameKind.HELLO, name="peer"))
    for number in (0, 0, 1, 3):
        peer.send_multipart(pack_batch(numbers(4)[number], number))
    epoch = iter(receiver)

    assert taken([next(epoch), next(epoch)]) == [0, 1]
    assert receiver.rejected == 1
    with pytest.raises(SenderFailed, match="2 arrived"):
        next(epoch)
    while kind_of(answer := peer.recv_multipart()) != FrameKind.STOP:
        assert kind_of(answer) in (FrameKind.WELCOME, FrameKind.CREDIT)


def test_a_damaged_batch_is_dropped_and_its_epoch_does_not_end_as_if_it_had_come(
    receiver: FrameReceiver, peer: zmq.Socket[bytes]
) -> None:
    head, *parts = pack_batch(np.arange(10))
    peer.send_multipart(pack_note(FrameKind.HELLO, name="peer"))
    peer.send_multipart([head, bytes(len(part) for part in parts) + bytes(79)])
    peer.send_multipart(pack_note(FrameKind.END, 1))

    with pytest.raises(SenderFailed, match="0 arrived"):
        next(iter(receiver))
    assert receiver.rejected == 1


def test_an_oversized_buffer_ends_its_connection_only() -> None:
    with (
        FrameReceiver(ANY_PORT, limit_bytes=1000) as receiver,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as peer,
    ):
        peer.setsockopt(zmq.LINGER, 0)
        peer.monitor("inproc://events", zmq.EVENT_DISCONNECTED)
        with context.socket(zmq.PAIR) as events:
            events.connect("inproc://events")
            peer.connect(receiver.endpoint)
            peer.send(bytes(1 << 20))
            assert events.poll(int(TIMEOUT_S * 1000))
            peer.disable_monitor()
        with in_thread(send_batches, numbers(3), receiver.endpoint):
            assert taken(receiver) == [0, 1, 2]


# Closing


def test_close_wakes_a_waiting_thread(receiver: FrameReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_receiver, "POLL_INTERVAL_S", 3600.0)
    with in_thread(taken, receiver) as came:
        time.sleep(0.2)
        receiver.close()
        with pytest.raises(UsageError, match="closed"):
            came.result(TIMEOUT_S)
    receiver.close()
    with pytest.raises(UsageError, match="closed"):
        iter(receiver)


def test_a_closed_or_dropped_receiver_frees_its_endpoint() -> None:
    receiver = FrameReceiver(ANY_PORT)
    endpoint = receiver.endpoint
    for _ in range(3):
        receiver.close()
        receiver = FrameReceiver(endpoint)
    with pytest.raises(OperationError, match="in use"):
        FrameReceiver(endpoint)
    del receiver
    gc.collect()
    FrameReceiver(endpoint).close()


def test_nothing_is_left_open() -> None:
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    def epoch() -> None:
        with FrameReceiver(ANY_PORT) as receiver, in_thread(send_batches, numbers(3), receiver.endpoint):
            assert taken(receiver) == [0, 1, 2]

    epoch()  # pyzmq opens what it keeps
    before = open_files()
    for _ in range(5):
        epoch()
    assert open_files() <= before


def test_beginning_again_ends_the_iteration_before(receiver: FrameReceiver) -> None:
    with in_thread(lambda: [send_batches(numbers(9), receiver.endpoint) for _ in range(2)]) as sent:
        first = iter(receiver)
        next(first)
        assert taken(receiver) == list(range(9))
        with pytest.raises(UsageError, match="another iteration"):
            next(first)
        assert sent.result(TIMEOUT_S)[1] == 9


def test_ctrl_c_ends_a_receiver_that_waits() -> None:
    with program(RECEIVER) as process:
        line_of(process)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=TIMEOUT_S)

    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in errors


@pytest.mark.torture
@pytest.mark.parametrize("iterating", torture_except([False, True], False))
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


@pytest.mark.parametrize(
    "given",
    [
        {"endpoint": "inproc://here"},
        {"endpoint": "127.0.0.1:80"},
        {"senders": 0},
        {"high_water_mark": 0},
        {"senders": 2, "bind": False},
        {"limit_bytes": "much"},
    ],
)
def test_arguments_that_are_not_valid_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        FrameReceiver(**{"endpoint": ANY_PORT, **given})


@pytest.mark.parametrize("name", ["", "x" * 257])
def test_a_name_that_no_receiver_takes_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="1 to 256"):
        send_batches(numbers(1), ANY_PORT, name=name)


def test_a_receiver_closed_right_after_the_epoch_has_acknowledged_it() -> None:
    for _ in range(20):
        with (
            FrameReceiver(ANY_PORT) as receiver,
            in_thread(send_batches, numbers(2), receiver.endpoint) as sent,
        ):
            assert taken(receiver) == [0, 1]
            receiver.close()
            assert sent.result(TIMEOUT_S) == 2


def test_an_error_of_many_odd_characters_is_reported(receiver: FrameReceiver) -> None:
    def batches() -> Iterator[Any]:
        raise OwnError("\N{CROISSANT}" * 100_000)
        yield

    with in_thread(send_batches, batches, receiver.endpoint) as sent:
        with pytest.raises(SenderFailed, match="\N{CROISSANT}"):
            next(iter(receiver))
        with pytest.raises(OwnError):
            sent.result(TIMEOUT_S)


def test_an_address_of_another_machine_is_an_operation_error() -> None:
    with pytest.raises(OperationError, match=r"192\.0\.2\.1"):
        FrameReceiver("tcp://192.0.2.1:5555")
    with pytest.raises(OperationError):
        FrameReceiver(f"ipc:///nonexistent-{os.getpid()}/frames")


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        (20_000_000, 10),
        *(
            pytest.param(s, marks=pytest.mark.torture)
            for s in ((10, 20_000_000), (20_000_000, 20_000_000, 0))
        ),
    ],
)
def test_memory_is_free_only_once_all_parts_are_on_the_wire(sizes: tuple[int, ...]) -> None:
    """The small last part is copied at once, while the large one before it is still being sent."""
    frame_socket = partial(FrameSocket, most_bytes=1 << 30)
    with (
        closing(frame_socket(zmq.PULL, ANY_PORT, bind=True, options={zmq.RCVHWM: 1})) as far,
        closing(frame_socket(zmq.PUSH, far.endpoint, bind=False, options={})) as near,
    ):
        parts = [bytes(size) for size in sizes]
        sent = [near.send_tracked(parts) for _ in range(10)]  # more than sockets hold
        with pytest.raises(zmq.NotDone):
            sent[-1].wait(0.2)
        for _ in sent:
            assert far.wait(TIMEOUT_S)
            assert far.receive()
        sent[-1].wait(TIMEOUT_S)
