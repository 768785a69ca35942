"""Repeated passes, and passes that are cut short."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from shardprep.formats.errors import UsageError
from shardprep.loaders import Flow
from shardprep.loaders.batches.passes import end
from shardprep.loaders.flow.passes import PassContext
from shardprep.loaders.flow.steps import Repeat, Take
from support.flow_members import Items, all_of, item_of, plain

lists = st.lists(st.integers(), max_size=6)


@given(passes=st.integers(1, 4), number=st.integers(0, 5))
def test_a_pass_runs_through_so_many_of_the_source(passes: int, number: int) -> None:
    source = Items(3)
    for _ in Repeat(source, passes).run(PassContext(number)):
        pass
    assert source.begun == source.ended == list(range(number * passes, (number + 1) * passes))


@pytest.mark.parametrize("number", [0, 3])
def test_endless_passes_are_others_in_every_pass(number: int) -> None:
    source = Items(2)
    items = Repeat(source, None).run(PassContext(number))
    assert len(list(islice(items, 5))) == 5
    end(items)
    assert source.begun == source.ended == [number << 32, (number << 32) + 1, (number << 32) + 2]


def test_a_pass_is_begun_when_its_first_item_is_asked_for() -> None:
    source = Items(2)
    items = Repeat(source, None).run(PassContext())
    assert [plain(next(items)) for _ in range(2)] == [plain(item_of(0)), plain(item_of(1))]
    assert source.begun == [0]


def test_an_empty_pass_is_an_error_where_it_would_be_repeated_for_ever() -> None:
    flow = Flow.from_iterable(range(3)).filter(lambda item: False).repeat()
    with pytest.raises(UsageError, match="had no items"):
        list(flow)
    with pytest.raises(UsageError, match="without items"):
        Flow.from_iterable([]).repeat()


def test_so_it_is_in_a_later_pass() -> None:
    passes = iter([[1, 2], []])
    items = iter(Flow.from_callable(lambda: next(passes)).repeat())
    assert [next(items), next(items)] == [1, 2]
    with pytest.raises(UsageError, match="pass 1 of a flow that is repeated without end had no items"):
        next(items)


def test_an_endless_flow_cannot_be_repeated() -> None:
    for passes in (2, None):
        with pytest.raises(UsageError, match="take"):
            Flow.from_iterable([1]).repeat().repeat(passes)


@pytest.mark.parametrize("passes", [-1, 1.0, True, "2"])
def test_what_is_no_number_of_passes_is_refused(passes: Any) -> None:
    with pytest.raises(UsageError, match="number of passes must be"):
        Flow.from_iterable([1]).repeat(passes)


def test_items_by_number_are_not_made_to_be_skipped() -> None:
    made: list[int] = []
    flow = Flow.from_iterable(range(10)).map(lambda item: made.append(item) or item)  # type: ignore[func-returns-value]

    assert list(flow.skip(7)) == made == [7, 8, 9]


@pytest.mark.parametrize("count", [0, 3])
def test_the_source_ends_with_the_last_that_is_taken_and_is_asked_for_no_more(count: int) -> None:
    asked = []

    def begin() -> Iterator[int]:
        for number in range(10):
            asked.append(number)
            yield number

    items = iter(Flow.from_callable(begin).take(count))
    assert list(items) == list(range(count)) == asked


@pytest.mark.parametrize("count", [-1, 1.0, True, None])
def test_what_is_no_number_of_items_is_refused(count: Any) -> None:
    with pytest.raises(UsageError, match="number of items to take must be"):
        Flow.from_iterable([1]).take(count)


def test_numpys_integers_are_integers() -> None:
    node = Take(Repeat(Items(3), np.int8(100)), np.uint8(255))  # type: ignore[arg-type]
    assert len(all_of(node, PassContext(50))) == 255
