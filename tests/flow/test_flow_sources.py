"""Sources of Python's kinds, and the source of generated items."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shardprep.formats.errors import UsageError
from shardprep.loaders import Flow


class CountedIterable:
    """An iterable that counts its iterations; its ``len`` may be wrong."""

    def __init__(self, items: int, length: int | None = None) -> None:
        self.items = items
        self.asked = self.closed = 0
        if length is not None:
            self.__class__ = type("Sized", (CountedIterable,), {"__len__": lambda self: length})

    def __iter__(self) -> Iterator[int]:
        self.asked += 1
        try:
            yield from range(self.items)
        finally:
            self.closed += 1


def three() -> Iterator[int]:
    yield from range(3)


@pytest.mark.parametrize("says", [4, 6])
def test_a_length_that_is_wrong_is_an_error_at_the_end_of_the_pass(says: int) -> None:
    items = Flow.from_iterable(CountedIterable(5, length=says)).at_pass(3)
    assert [next(items) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(
        UsageError, match=f"says that it has {says} items, but pass 3 had 5: give Flow.from_callable"
    ):
        next(items)


def the_same_generator() -> Callable[[], Any]:
    items = three()
    return lambda: items


def test_two_passes_at_once_cannot_share_one_iterator() -> None:
    flow = Flow.from_callable(the_same_generator())
    first, second = iter(flow), iter(flow)
    next(first)
    with pytest.raises(UsageError, match="same iterator"):
        next(second)


@pytest.mark.parametrize("returned", [None, 3, "text", {"a": 1}])
def test_a_function_that_returns_no_items_is_an_error(returned: Any) -> None:
    with pytest.raises(UsageError, match=r"returned|iterable"):
        list(Flow.from_callable(lambda: returned))


class Exhausted:
    """A sequence that draws its elements from an iterator that ends too early."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, number: int) -> int:
        return next(iter([number] if number < 4 else []))


def test_a_sequence_that_raises_stop_iteration_does_not_end_the_pass_in_silence() -> None:
    flow = Flow.from_iterable(Exhausted())

    with pytest.raises(RuntimeError, match="item 4 of the Exhausted raised StopIteration"):
        list(flow)
    with pytest.raises(RuntimeError, match="item 7"):
        list(flow.pick(0, [1, 7, 2]))
