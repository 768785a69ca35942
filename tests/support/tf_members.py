"""The inputs under test, the ways to get an epoch out of one, and small sources with distinct epochs."""

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import pytest

from shardprep.loaders.tf_inputs import (
    BatchQueueInput,
    DatasetInput,
    FeedInput,
    Input,
    QueueInput,
    StagingInput,
    to_dataset,
)
from support.loaded import numbers_in
from support.tf_devices import tf

TIMEOUT_S = 120  # after which a test fails

Made = Callable[..., Input]


@dataclass(frozen=True)
class Rows:
    """The records of a source of tuples of arrays, for an input that makes batches itself."""

    batches: Any
    rows: int

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches() if callable(self.batches) else self.batches:
            yield from zip(*batch, strict=True)


def batch_queue(source: Any, *, rows: int = 10, **options: Any) -> Input:
    return BatchQueueInput(Rows(source, rows), rows, **options)


def staging_over_queue(source: Any, *, depth: int = 2, **options: Any) -> Input:
    return StagingInput(QueueInput(source, **options), depth=depth)


def dataset_input(source: Any, **options: Any) -> Input:
    return DatasetInput(to_dataset(source, **options))


def staging(depth: int) -> Made:
    return lambda source, **options: StagingInput(source, depth=depth, **options)


WHOLE: dict[str, Made] = {  # these take batches unchanged
    "feed": FeedInput,
    "queue": QueueInput,
    "staging-1": staging(1),
    "staging-2": staging(2),
    "staging-over-queue": staging_over_queue,
    "dataset": dataset_input,
}
MEMBERS = WHOLE | {"batch-queue": batch_queue}
FED = {name: make for name, make in MEMBERS.items() if name not in ("feed", "dataset")}


QUICK = ("staging-over-queue", "dataset")  # the others share most of their code with these


def members(names: Mapping[str, Made] = MEMBERS, quick: Collection[str] = QUICK) -> pytest.MarkDecorator:
    """Give a test its ``make``: the quick ones always, the others in the torture."""
    made = [
        pytest.param(make, id=name, marks=() if name in quick else pytest.mark.torture)
        for name, make in names.items()
    ]
    return pytest.mark.parametrize("make", made)


def arrays(batch: Any) -> Any:
    """A copy of a batch as numpy arrays."""
    return tf.nest.map_structure(lambda tensor: np.asarray(tensor).copy(), batch)


def assert_same_form(one: Any, other: Any) -> None:
    """Check that two batches are equal bit for bit, with structure and dtypes."""
    tf.nest.assert_same_structure(one, other)
    for x, y in zip(tf.nest.flatten(one), tf.nest.flatten(other), strict=True):
        assert x.dtype == np.asarray(y).dtype
        np.testing.assert_array_equal(x, y)


def until_the_end(step: Callable[[], Any], steps: int | None = None) -> list[Any]:
    """The results of the step until its epoch is over, or so many of them."""
    out = []
    with suppress(tf.errors.OutOfRangeError):
        while steps is None or len(out) < steps:
            out.append(arrays(step()))
    return out


def stepping(each: Input) -> Callable[[], Any]:
    """A compiled step that returns its batch."""
    return tf.function(lambda: each.dequeue())  # type: ignore[no-any-return]


def forever(step: Callable[[], Any]) -> Iterator[Any]:
    """The results of the step until it raises."""
    while True:
        yield step()


def by_function(each: Input) -> Callable[[], list[Any]]:
    step = stepping(each)
    return lambda: until_the_end(step)


def by_dataset(each: Input) -> Callable[[], list[Any]]:
    dataset = each.to_dataset()
    return lambda: list(map(arrays, dataset))


WAYS: dict[str, Callable[[Input], Callable[[], list[Any]]]] = {
    "iteration": lambda each: lambda: list(map(arrays, each)),
    "eager dequeue": lambda each: lambda: until_the_end(each.dequeue),
    "tf.function": by_function,
    "dataset": by_dataset,
}


@dataclass
class Numbered:
    """Source of passes of ``batches`` batches (values float32 [B, 2], numbers int64 [B]), one per call.

    Values are the number of the pass. ``before`` is called with the step before each batch, and at the end.
    """

    batches: int = 6
    rows: int = 3
    last: int = 1
    before: Callable[[int], object] = lambda step: None
    passes: int = field(default=0, init=False)

    def __call__(self) -> Iterator[tuple[Any, Any]]:
        number, self.passes = self.passes, self.passes + 1
        return self._pass(number)

    def _pass(self, number: int) -> Iterator[tuple[Any, Any]]:
        for step in range(self.batches):
            self.before(step)
            rows = self.rows if step < self.batches - 1 else self.last
            yield (
                np.full((rows, 2), number, np.float32),
                np.arange(step * self.rows, step * self.rows + rows),
            )
        self.before(self.batches)

    def numbers(self) -> list[int]:
        """The values of every whole pass."""
        return list(range((self.batches - 1) * self.rows + self.last))


def assert_whole(source: Numbered, batches: list[Any]) -> None:
    """One whole pass of the source, and of one pass only."""
    assert numbers_in(batches) == source.numbers()
    assert len({float(value) for batch in batches for value in batch[0].ravel()}) == 1


def first(batches: Any, steps: int) -> list[Any]:
    """Draw so many batches of an epoch that is then left."""
    return [arrays(batch) for batch in islice(iter(batches), steps)]


class Stop:
    """A wait of a source that a test can end; it always ends within the test's time-out."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self.go_on.wait(TIMEOUT_S)

    def source(self) -> Numbered:
        """A source that waits before its second batch."""
        return Numbered(before=lambda step: self() if step == 1 else None)


class Aside:
    """A call in a new thread, with its result."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self._call = call
        self._thread = threading.Thread(target=self._run, name="shardprep-test")
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._call()
        except BaseException as error:
            self.error = error

    def join(self) -> None:
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive(), "it hangs"


def woken_by_closing(each: Input, step: Callable[[], Any], stop: Stop) -> BaseException | None:
    """The error of a step that waits for ``stop.source()`` when the input is closed."""
    step()
    assert stop.reached.wait(TIMEOUT_S)
    waiting = Aside(step)
    time.sleep(0.1)

    closing = Aside(each.close)
    waiting.join()
    stop.go_on.set()
    closing.join()
    return waiting.error
