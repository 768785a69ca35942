"""Batches from another process as an input of TensorFlow."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders.machines.frames import FrameReceiver, ReceiverGone, SenderFailed, send_batches
from shardprep.loaders.tf_inputs import QueueInput, StagingInput, ZMQInput, original_errors
from support.tf_devices import tf
from support.tf_members import TIMEOUT_S, until_the_end

ANY_PORT = "tcp://127.0.0.1:*"
BATCHES = [
    {
        "image": np.full((rows, 4, 4), 10 * number, np.float32),
        "number": np.arange(rows) + 3 * number,
        "key": [b"k"] * rows,
    }
    for number, rows in enumerate([3, 3, 3, 3, 1])
]
SIGNATURE = {
    "image": tf.TensorSpec([None, 4, 4], tf.float32),
    "number": tf.TensorSpec([None], tf.int64),
    "key": tf.TensorSpec([None], tf.string),
}
NUMBERS = list(range(13))


@contextmanager
def sending(endpoint: str, batches: Any = BATCHES, *, epochs: int = 1) -> Iterator[Any]:
    """A future of the result of sending each epoch."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(lambda: [send_batches(batches, endpoint) for _ in range(epochs)])


def numbers_in(batches: Any) -> list[int]:
    return [number for batch in batches for number in batch["number"].numpy().tolist()]


def numbers_of(step: Callable[[], Any]) -> list[int]:
    """The results of an epoch's steps."""
    return [number for numbers in until_the_end(step) for number in numbers.tolist()]


@pytest.fixture
def source() -> Iterator[ZMQInput]:
    with ZMQInput(ANY_PORT, SIGNATURE) as source:
        yield source


def test_three_epochs_arrive_exactly_once(source: ZMQInput) -> None:
    with sending(source.endpoint, epochs=3) as sent:
        for _ in range(3):
            batches = list(source)
            assert numbers_in(batches) == NUMBERS
            assert [set(b["image"].numpy().ravel().tolist()) for b in batches] == [
                {10.0 * n} for n in range(5)
            ]
            assert batches[-1]["key"].numpy().tolist() == [b"k"]
        assert sent.result(TIMEOUT_S) == [5, 5, 5]
    assert source.rejected == 0
    assert source.stats().epochs == 3


def test_three_epochs_arrive_in_a_function(source: ZMQInput) -> None:
    @tf.function
    def step() -> Any:
        batch = source.dequeue()
        return batch["number"] + tf.cast(0 * tf.reduce_sum(batch["image"]), tf.int64)

    with sending(source.endpoint, epochs=3):
        assert [numbers_of(step) for _ in range(3)] == [NUMBERS] * 3


def test_three_epochs_arrive_in_a_session() -> None:
    with tf.Graph().as_default(), ZMQInput(ANY_PORT, SIGNATURE) as source:
        number = source.dequeue()["number"]
        with tf.compat.v1.Session() as session, sending(source.endpoint, epochs=3):
            source.start(session)
            assert [numbers_of(lambda: session.run(number)) for _ in range(3)] == [NUMBERS] * 3
            source.close()


def test_two_senders_share_an_epoch() -> None:
    with ZMQInput(ANY_PORT, SIGNATURE, senders=2, capacity=1) as source, ThreadPoolExecutor(2) as pool:
        for name, batches in (("one", BATCHES[:2]), ("other", BATCHES[2:])):
            pool.submit(send_batches, batches, source.endpoint, name=name)
        assert sorted(numbers_in(source)) == NUMBERS


def test_what_was_received_is_not_copied() -> None:
    received = []

    class Noting(FrameReceiver):
        def __iter__(self) -> Iterator[Any]:
            for batch in super().__iter__():
                received.append(batch["image"].ctypes.data)
                yield batch

    with (
        Noting(ANY_PORT) as receiver,
        sending(receiver.endpoint),
        QueueInput(receiver, signature=SIGNATURE, capacity=5) as each,
    ):
        images = [np.frombuffer(memoryview(batch["image"]), np.uint8) for batch in each]
    assert [image.ctypes.data for image in images] == received


def test_it_is_staged_and_closed_with_its_stage() -> None:
    source = ZMQInput(ANY_PORT, SIGNATURE)
    with StagingInput(source, depth=2) as staged, sending(source.endpoint, epochs=2):
        assert numbers_in(staged) == NUMBERS
        assert numbers_in(staged) == NUMBERS
    FrameReceiver(source.endpoint).close()


def test_close_wakes_a_step_that_waits(source: ZMQInput) -> None:
    closing = threading.Timer(0.3, source.close)
    closing.start()

    with pytest.raises(UsageError, match="closed"):
        next(iter(source))
    closing.join(TIMEOUT_S)
    source.close()
    FrameReceiver(source.endpoint).close()


def test_close_in_the_middle_is_told_to_the_sender(source: ZMQInput) -> None:
    with sending(source.endpoint, BATCHES * 100) as sent:
        batches = iter(
            source
        )  # kept, because an epoch that is ended early is different from a receiver that is gone
        next(batches)
        source.close()
        with pytest.raises(ReceiverGone):
            sent.result(TIMEOUT_S)


def test_an_epoch_that_is_left_does_not_leak_into_the_next(source: ZMQInput) -> None:
    with sending(source.endpoint, BATCHES * 10, epochs=2) as sent:
        for _ in source:
            break
        assert numbers_in(source) == NUMBERS * 10
        first, second = sent.result(TIMEOUT_S)
        assert (first < 50, second) == (True, 50)


class OwnError(Exception):
    pass


def failing() -> Iterator[Any]:
    yield BATCHES[0]
    raise OwnError("the disk is wet")


def test_a_sender_s_error_is_raised_in_the_step_and_the_next_epoch_is_whole(source: ZMQInput) -> None:
    with sending(source.endpoint, failing) as sent:
        with pytest.raises(SenderFailed, match="OwnError: the disk is wet"):
            list(source)
        with pytest.raises(OwnError):
            sent.result(TIMEOUT_S)
    with sending(source.endpoint):
        assert numbers_in(source) == NUMBERS


def test_a_sender_s_error_is_raised_through_tensorflow(source: ZMQInput) -> None:
    step = tf.function(lambda: source.dequeue()["number"])

    said = pytest.raises(SenderFailed, match="the disk is wet")
    with sending(source.endpoint, failing) as sent, said, original_errors():
        until_the_end(step)
    assert isinstance(sent.exception(), OwnError)


def test_batches_that_are_not_what_the_signature_says_are_told_on_both_sides(source: ZMQInput) -> None:
    with sending(source.endpoint, [np.zeros(3)] * 50) as sent:
        with pytest.raises(UsageError, match="signature"):
            next(iter(source))
        assert sent.result(TIMEOUT_S)[0] < 50


def test_a_capacity_in_bytes_counts_the_signature() -> None:
    fixed = (tf.TensorSpec([10, 10], tf.float32), tf.TensorSpec([10], tf.int64))

    with ZMQInput(ANY_PORT, fixed, capacity="2KB") as source:
        assert source.stats().capacity == 2000 // 480


@pytest.mark.parametrize(
    "given",
    [
        {"signature": None},
        {"signature": (np.zeros(3),)},
        {"capacity": "1MB"},
        {"capacity": 0},
        {"endpoint": "inproc://here"},
    ],
    ids=str,
)
def test_invalid_options_are_refused_and_the_endpoint_is_free(given: dict[str, Any]) -> None:
    with FrameReceiver(ANY_PORT) as receiver:
        endpoint = receiver.endpoint

    with pytest.raises(UsageError):
        ZMQInput(**{"endpoint": endpoint, "signature": SIGNATURE, **given})
    FrameReceiver(endpoint).close()


def test_an_input_that_is_dropped_frees_its_endpoint() -> None:
    source = ZMQInput(ANY_PORT, SIGNATURE)
    endpoint = source.endpoint
    with sending(endpoint, BATCHES):
        for _ in source:
            pass
    del source
    FrameReceiver(endpoint).close()
