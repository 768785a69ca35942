"""Sources of Python's kinds, and the source of generated items."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from shardprep.formats.errors import UsageError
from shardprep.loaders import Flow
from shardprep.loaders.flow.passes import Function, PassContext, PassResources
from shardprep.loaders.flow.sources import (
    FromCallable,
    FromFakeData,
    FromIterable,
    FromSequence,
    from_iterable,
)
from shardprep.loaders.loader.fake import FakeData
from support.flow_members import all_of
from support.sampling import torture_except


class Squares:
    """A sequence like those of some libraries: no iteration, and no IndexError at its end."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, number: int) -> int:
        return number**2


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


SEQUENCES: list[tuple[Any, list[Any]]] = [
    ([1, 2, 3], [1, 2, 3]),
    ((4, 5), [4, 5]),
    (range(3, 9, 2), [3, 5, 7]),
    (deque([1, 2]), [1, 2]),
    (Squares(), [0, 1, 4, 9, 16]),
    (memoryview(b"ab"), [97, 98]),
    ([], []),
]


@pytest.mark.parametrize(("items", "expected"), SEQUENCES, ids=map(str, range(len(SEQUENCES))))
def test_a_sequence_gives_its_items_and_any_of_them(items: Any, expected: list[Any]) -> None:
    node = from_iterable(items)

    assert isinstance(node, FromSequence)
    assert node.length.items == len(expected)
    assert list(node.run(PassContext(0))) == list(node.run(PassContext(1))) == expected
    numbers = [*range(len(expected))][::-1] * 2
    assert list(node.pick(PassContext(), numbers)) == [expected[n] for n in numbers]
    for wrong in (-1, len(expected)):
        with pytest.raises(IndexError, match=f"item {wrong} of {len(expected)}"):
            list(node.pick(PassContext(), [wrong]))


def test_an_array_gives_its_rows() -> None:
    rows = np.arange(6).reshape(3, 2)
    flow = Flow.from_iterable(rows)
    assert len(flow) == 3
    assert [row.tolist() for row in flow] == rows.tolist()
    assert [row.tolist() for row in flow.pick(0, [2, 0])] == [[4, 5], [0, 1]]


@pytest.mark.parametrize("items", [{1, 2}, {1: 2}.keys(), {1: 2}.items(), frozenset("ab")])
def test_what_has_a_length_and_no_numbers_is_exact_and_cannot_be_picked(items: Any) -> None:
    node = from_iterable(items)

    assert isinstance(node, FromIterable)
    assert node.length.items == len(items)
    assert list(node.run(PassContext())) == list(node.run(PassContext())) == list(items)
    assert not node.can_pick


def test_an_iterable_is_asked_once_for_each_pass_and_closed_with_it() -> None:
    items = CountedIterable(5)
    flow = Flow.from_iterable(items)
    assert not flow.length.is_exact
    assert items.asked == 0

    assert list(flow) == list(flow) == [0, 1, 2, 3, 4]
    third = iter(flow)
    assert next(third) == 0
    third.close()  # type: ignore[attr-defined]
    assert items.asked == items.closed == 3


def test_a_pass_that_was_never_drawn_from_asks_for_nothing() -> None:
    items = CountedIterable(5)
    iter(Flow.from_iterable(items))
    assert items.asked == 0


@pytest.mark.parametrize("says", [4, 6])
def test_a_length_that_is_wrong_is_an_error_at_the_end_of_the_pass(says: int) -> None:
    items = Flow.from_iterable(CountedIterable(5, length=says)).at_pass(3)
    assert [next(items) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(
        UsageError, match=f"says that it has {says} items, but pass 3 had 5: give Flow.from_callable"
    ):
        next(items)


def test_a_pass_that_is_left_early_is_not_counted() -> None:
    items = iter(Flow.from_iterable(CountedIterable(5, length=4)))
    next(items)
    items.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("items", "advice"),
    [
        (iter([1]), "from_callable"),
        (three(), "from_callable"),
        (zip([1], strict=False), "from_callable"),
        ("abc", "give a list"),
        (b"abc", "give a list"),
        (bytearray(b"abc"), "give a list"),
        ({"a": 1}, "give a list"),
        (three, "from_callable"),
        (3, "give a list"),
        (None, "give a list"),
    ],
    ids=[
        "list iterator",
        "generator",
        "zip",
        "text",
        "bytes",
        "bytearray",
        "dict",
        "function",
        "number",
        "none",
    ],
)
def test_what_is_not_many_items_is_refused_with_advice(items: Any, advice: str) -> None:
    with pytest.raises(UsageError, match=advice):
        Flow.from_iterable(items)


@given(passes=st.integers(1, 4))
def test_a_function_is_called_for_each_pass(passes: int) -> None:
    calls: list[int] = []

    def begin() -> list[int]:
        calls.append(len(calls))
        return [calls[-1]] * 2

    flow = Flow.from_callable(begin)
    assert str(flow.length) == "unknown"
    assert [list(flow) for _ in range(passes)] == [[n, n] for n in range(passes)]


def test_a_generator_is_closed_when_its_pass_is_left() -> None:
    ended = []

    def begin() -> Iterator[int]:
        try:
            yield from range(5)
        finally:
            ended.append(True)

    items = iter(Flow.from_callable(begin))
    next(items)
    items.close()  # type: ignore[attr-defined]
    assert ended == [True]


def the_same_generator() -> Callable[[], Any]:
    items = three()
    return lambda: items


def the_same_iterator() -> Callable[[], Any]:
    items = iter([0, 1, 2])
    return lambda: items


@pytest.mark.parametrize("begin", [the_same_generator, the_same_iterator])
def test_a_function_that_returns_its_spent_iterator_again_is_an_error(
    begin: Callable[[], Callable[[], Any]],
) -> None:
    flow = Flow.from_callable(begin())
    assert list(flow) == [0, 1, 2]
    for _ in range(2):
        with pytest.raises(UsageError, match="same iterator"):
            list(flow)


def test_two_passes_at_once_cannot_share_one_iterator() -> None:
    flow = Flow.from_callable(the_same_generator())
    first, second = iter(flow), iter(flow)
    next(first)
    with pytest.raises(UsageError, match="same iterator"):
        next(second)


def test_a_function_may_return_the_same_list_again() -> None:
    items = [1, 2]
    flow = Flow.from_callable(lambda: items)
    assert list(flow) == list(flow) == items


def test_what_a_function_raises_comes_as_itself() -> None:
    def begin() -> list[int]:
        raise KeyError("no")

    with pytest.raises(KeyError):
        list(Flow.from_callable(begin))


@pytest.mark.parametrize("returned", [None, 3, "text", {"a": 1}])
def test_a_function_that_returns_no_items_is_an_error(returned: Any) -> None:
    with pytest.raises(UsageError, match=r"returned|iterable"):
        list(Flow.from_callable(lambda: returned))


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(UsageError, match="not its result"):
        Flow.from_callable(three())  # type: ignore[arg-type]


def test_sources_are_picklable() -> None:
    for node in (from_iterable([1, 2]), from_iterable({1, 2}), FromCallable(Function(three))):
        assert all_of(pickle.loads(pickle.dumps(node))) == all_of(node)  # noqa: S301


def test_what_is_shared_by_passes_is_closed_with_the_flow() -> None:
    class Thing:
        closed = 0

        def close(self) -> None:
            self.closed += 1

    kept, place = PassResources(), ((), 0)
    first = kept.shared(place, Thing)
    assert kept.shared(place, Thing) is first
    assert kept.shared(((), 1), Thing) is not first
    kept.close()
    kept.close()
    assert first.closed == 1


@pytest.mark.slow
@pytest.mark.parametrize("encoded", torture_except([False, True], False))
def test_fake_items_are_those_of_fake_batches(encoded: bool) -> None:
    data = FakeData(7, batch_size=1, size=(4, 6), encoded=encoded, seed=3)
    node = FromFakeData(data)

    items = list(node.run(PassContext()))

    assert len(items) == node.length.items == 7
    for (image, label), (images, labels) in zip(items, data, strict=True):
        assert bytes(image) == bytes(images[0])
        assert label == labels[0]
        assert type(label) is int
        if encoded:
            assert type(image) is bytes
        else:
            assert image.shape == (4, 6, 3)
            assert not image.flags.writeable
    assert all_of(pickle.loads(pickle.dumps(node))) == all_of(node)  # noqa: S301
    picked = list(node.pick(PassContext(), [6, 0, 6]))
    assert [bytes(image) for image, _ in picked] == [bytes(items[n][0]) for n in (6, 0, 6)]


def test_a_fake_item_costs_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    flow = Flow.fake(5, size=(2, 2), seconds=0.25)
    assert len(list(flow)) == 5
    assert slept == [0.25] * 5


def test_fake_batches_of_several_are_refused() -> None:
    with pytest.raises(UsageError, match="batch_size=1"):
        FromFakeData(FakeData(3, batch_size=2, size=(2, 2)))


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
