"""Inputs in the graphs and sessions of TensorFlow 1: epochs, errors, and closing in any state."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders.tf_inputs import DatasetInput, Input, QueueInput, original_errors
from support.loaded import numbers_in
from support.loader_workers import OwnError
from support.tf_devices import tf
from support.tf_members import (
    Aside,
    Made,
    Numbered,
    assert_whole,
    batch_queue,
    dataset_input,
    forever,
    members,
    staging_over_queue,
    until_the_end,
)

v1 = tf.compat.v1


FED: dict[str, Made] = {
    "queue": QueueInput,
    "batch-queue": partial(batch_queue, rows=3),
    "staging-over-queue": partial(staging_over_queue, depth=1),
    "deep-staging-over-queue": partial(staging_over_queue, depth=3),
}
MEMBERS = FED | {"dataset": dataset_input}


@pytest.fixture(autouse=True)
def graph() -> Iterator[Any]:
    with tf.Graph().as_default() as made:
        yield made


@contextmanager
def running(each: Input) -> Iterator[Callable[[], Any]]:
    """A function that runs a step which returns a batch, in a session that the input is closed in."""
    batch = each.dequeue()
    with v1.Session() as session:
        each.start(session)
        yield lambda: session.run(batch)
        each.close()


@members(MEMBERS)
def test_an_error_comes_as_itself_after_all_batches_before_it(make: Made) -> None:
    def fail(step: int) -> None:
        if step == 4:
            raise OwnError("at 4")

    source = Numbered(before=fail)
    with make(source) as each, running(each) as step:
        for _ in range(1 if isinstance(each, DatasetInput) else 3):
            got: list[Any] = []
            with pytest.raises(OwnError, match="at 4") as caught, original_errors():
                got.extend(forever(step))
            assert numbers_in(got) == source.numbers()[:12]
            assert isinstance(caught.value.__cause__, tf.errors.OpError)


@members(FED)
def test_an_epoch_may_be_left(make: Made) -> None:
    source = Numbered()
    with make(source) as each, running(each) as step:
        for steps in (1, 5, 6):
            assert numbers_in(until_the_end(step, steps)) == source.numbers()[: steps * 3]
            each.reset()  # type: ignore[attr-defined]
            assert_whole(source, until_the_end(step))


@members(MEMBERS, quick=("staging-over-queue",))
def test_session_and_input_may_be_closed_in_any_order(make: Made) -> None:
    for steps, first in product((0, 1, 6), ("session", "input")):
        each = make(Numbered(batches=20, last=3))
        batch = each.dequeue()
        session = v1.Session()
        each.start(session)
        for _ in range(steps):
            session.run(batch)
        time.sleep(0.05)  # its thread waits for room
        for close in (session.close, each.close) if first == "session" else (each.close, session.close):
            closing = Aside(close)
            closing.join()
            assert closing.error is None
        each.close()


@members(MEMBERS)
def test_an_input_that_was_never_started_may_be_closed_and_belongs_to_its_own_mode(make: Made) -> None:
    with make(Numbered()) as each:
        each.dequeue()
    with make(Numbered()) as each:
        if make in FED.values():
            with pytest.raises(UsageError, match="v1 graph"):
                iter(each)
    with ThreadPoolExecutor(1) as eager:  # the default of a new thread
        each = eager.submit(make, Numbered()).result()
        with pytest.raises(UsageError, match="make it within the v1 graph"):
            each.dequeue()
        eager.submit(each.close).result()


@members(FED)
def test_a_step_before_the_start_or_after_the_end_is_an_error_that_says_so(make: Made) -> None:
    with make(Numbered()) as each, v1.Session() as session:
        batch = each.dequeue()
        with pytest.raises(tf.errors.OpError, match=r"call its start\(session\)"):
            session.run(batch)
        each.start(session)
        each.close()
        with pytest.raises(tf.errors.OpError, match="this input is closed"):
            session.run(batch)
