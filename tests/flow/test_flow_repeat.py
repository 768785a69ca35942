"""Repeated passes, and passes that are cut short."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
from flow_members import Items, all_of, item_of, plain
from hypothesis import given
from hypothesis import strategies as st

from shardprep.formats.errors import UsageError
from shardprep.loaders import Flow
from shardprep.loaders.batching.passes import end
from shardprep.loaders.flow.core.length import exact
from shardprep.loaders.flow.core.pass_context import PassContext
from shardprep.loaders.flow.steps.repeat import Repeat, Take

lists = st.lists(st.integers(), max_size=6)


@given(items=lists, passes=st.integers(0, 5), number=st.integers(0, 3))
def test_passes_come_one_after_the_other(items: list[int], passes: int, number: int) -> None:
    flow = Flow.from_iterable(items).repeat(passes)
    assert len(flow) == len(items) * passes
    assert list(flow.at_pass(number)) == items * passes


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


def test_every_pass_is_shuffled_anew_and_as_it_would_be_alone() -> None:
    shuffled = Flow.from_iterable(range(30)).shuffle(30)
    alone = [list(shuffled.at_pass(n)) for n in range(6)]
    assert list(shuffled.repeat(3).at_pass(1)) == alone[3] + alone[4] + alone[5]
    assert list(islice(shuffled.repeat(), 60)) == alone[0] + alone[1]
    assert alone[0] != alone[1]


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


def test_an_empty_flow_can_be_repeated_some_times() -> None:
    assert list(Flow.from_iterable([]).repeat(3)) == []


def test_an_endless_flow_cannot_be_repeated() -> None:
    for passes in (2, None):
        with pytest.raises(UsageError, match="take"):
            Flow.from_iterable([1]).repeat().repeat(passes)


@pytest.mark.parametrize("passes", [-1, 1.0, True, "2"])
def test_what_is_no_number_of_passes_is_refused(passes: Any) -> None:
    with pytest.raises(UsageError, match="number of passes must be"):
        Flow.from_iterable([1]).repeat(passes)


@given(items=lists, count=st.integers(0, 8))
def test_the_first_items_are_taken(items: list[int], count: int) -> None:
    flow = Flow.from_iterable(items).take(count)
    assert list(flow) == items[:count]
    assert len(flow) == len(items[:count])


@pytest.mark.parametrize("count", [0, 3])
def test_the_source_ends_with_the_last_that_is_taken_and_is_asked_for_no_more(count: int) -> None:
    asked = []

    def begin() -> Iterator[int]:
        for number in range(10):
            asked.append(number)
            yield number

    items = iter(Flow.from_callable(begin).take(count))
    assert list(items) == list(range(count)) == asked


def test_some_of_an_endless_flow_are_exactly_so_many() -> None:
    flow = Flow.from_iterable([1, 2]).repeat().take(5)
    assert flow.length == exact(5)
    assert list(flow) == [1, 2, 1, 2, 1]


@pytest.mark.parametrize("count", [-1, 1.0, True, None])
def test_what_is_no_number_of_items_is_refused(count: Any) -> None:
    with pytest.raises(UsageError, match="number of items to take must be"):
        Flow.from_iterable([1]).take(count)


def test_numpys_integers_are_integers() -> None:
    node = Take(Repeat(Items(3), np.int8(100)), np.uint8(255))  # type: ignore[arg-type]
    assert len(all_of(node, PassContext(50))) == 255
