"""Sources as one pass after the other, and peeking at the first batch."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from shardprep.formats.errors import UsageError
from shardprep.loaders.batches.passes import Passes, end


class Sized:
    """A source with a next pass of another length than its epochs."""

    batches_per_epoch = 5

    def __init__(self, left: int) -> None:
        self.left = left

    def __len__(self) -> int:
        return self.left

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.left))


@given(source=st.lists(st.integers()), passes=st.integers(1, 4), peeks=st.lists(st.booleans(), max_size=4))
def test_every_pass_of_a_list_is_whole_whether_peeked_at_or_not(
    source: list[int], passes: int, peeks: list[bool]
) -> None:
    all_of = Passes(source)
    for number in range(passes):
        if source and number < len(peeks) and peeks[number]:
            assert all_of.peek() == all_of.peek() == source[0]
        assert list(all_of.begin()) == source


def test_a_function_is_called_for_each_pass_and_peeking_begins_the_next() -> None:
    calls: list[int] = []

    def source() -> Iterator[int]:
        calls.append(len(calls))
        return iter([calls[-1]] * 3)

    passes = Passes(source)
    assert passes.peek() == 0
    assert calls == [0]
    assert [list(passes.begin()) for _ in range(3)] == [[0] * 3, [1] * 3, [2] * 3]
    assert len(calls) == 3


@pytest.mark.parametrize("peeked", [False, True])
def test_an_iterator_has_one_pass(peeked: bool) -> None:
    passes = Passes(iter([1, 2, 3]))
    if peeked:
        assert passes.peek() == 1
    assert list(passes.begin()) == [1, 2, 3]
    for _ in range(2):
        with pytest.raises(UsageError, match="one pass"):
            passes.begin()
    with pytest.raises(UsageError, match="one pass"):
        passes.peek()


def test_an_empty_source_cannot_be_peeked_at() -> None:
    with pytest.raises(UsageError, match="give a signature"):
        Passes([]).peek()


@pytest.mark.parametrize("source", [None, 3, object()])
def test_what_cannot_be_iterated_is_an_error_at_once(source: Any) -> None:
    with pytest.raises(UsageError, match="iterable"):
        Passes(source)


def test_an_array_is_its_rows() -> None:
    rows = np.arange(6).reshape(3, 2)
    assert [row.tolist() for row in Passes(rows).begin()] == rows.tolist()


@pytest.mark.parametrize(
    ("source", "length"),
    [([1, 2], 2), (Sized(5), 5), (Sized(2), None), (lambda: [1], None), (iter([1]), None)],
    ids=["list", "whole", "resumed", "function", "iterator"],
)
def test_a_length_is_steady_where_every_pass_has_it(source: Any, length: int | None) -> None:
    assert Passes(source).steady_length == length


def test_the_length_is_the_next_passs() -> None:
    assert len(Passes(Sized(2))) == 2
    with pytest.raises(TypeError):
        len(Passes(lambda: [1]))


@pytest.mark.parametrize("peeked", [False, True])
@pytest.mark.parametrize("taken", [0, 1, 2])
def test_ending_a_pass_cleans_up_after_it_at_once(peeked: bool, taken: int) -> None:
    ended = []

    def source() -> Iterator[int]:
        try:
            yield from range(3)
        finally:
            ended.append(True)

    passes = Passes(source)
    if peeked:
        passes.peek()
    batches = passes.begin()
    for _ in range(taken):
        next(batches)
    end(batches)

    assert bool(ended) == (taken > 0 or peeked)
    assert list(passes.begin()) == [0, 1, 2]


def test_ending_what_knows_no_end_does_nothing() -> None:
    end(iter([1, 2]))


def test_an_error_of_the_source_comes_as_itself_while_peeking_and_after() -> None:
    def source() -> Iterator[int]:
        raise KeyError("no")
        yield

    passes = Passes(source)
    with pytest.raises(KeyError):
        passes.peek()
    with pytest.raises(KeyError):
        list(passes.begin())


def test_a_pass_keeps_no_batch_that_was_taken() -> None:
    class Batch:
        pass

    passes = Passes(lambda: (Batch() for _ in range(3)))
    passes.peek()
    batches = passes.begin()
    for _ in range(3):
        seen = weakref.ref(next(batches))
        gc.collect()
        assert seen() is None
