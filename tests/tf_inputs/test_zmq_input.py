"""Batches from another process as an input of TensorFlow."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders.machines.frames import FrameReceiver, SenderFailed, send_batches
from shardprep.loaders.tf_inputs import ZMQInput, original_errors
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


class OwnError(Exception):
    pass


def failing() -> Iterator[Any]:
    yield BATCHES[0]
    raise OwnError("the disk is wet")


def test_a_sender_s_error_is_raised_through_tensorflow(source: ZMQInput) -> None:
    step = tf.function(lambda: source.dequeue()["number"])

    said = pytest.raises(SenderFailed, match="the disk is wet")
    with sending(source.endpoint, failing) as sent, said, original_errors():
        until_the_end(step)
    assert isinstance(sent.exception(), OwnError)


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
