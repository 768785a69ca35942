"""Shuffling within a window: the orders, the items held, and that numbers and items are shuffled alike."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from shardprep.formats.errors import UsageError
from shardprep.loaders import Flow
from shardprep.loaders.flow.node import Node
from shardprep.loaders.flow.passes import Function, PassContext
from shardprep.loaders.flow.sources import FromCallable, FromSequence
from shardprep.loaders.flow.steps import LocallyShuffled
from support.flow_members import Items

seeds = st.integers(0, (1 << 64) - 1)


def without_numbers(items: int) -> FromCallable:
    return FromCallable(Function(lambda: iter(range(items))))


def order_of(source: Node, window: int, seed: int = 0, number: int = 0) -> list[int]:
    return list(LocallyShuffled(source, window, seed).run(PassContext(number)))


@given(items=st.integers(2, 300), seed=seeds, data=st.data())
def test_items_without_numbers_come_in_the_same_order(items: int, seed: int, data: st.DataObject) -> None:
    window = data.draw(st.integers(1, items - 1))
    assert order_of(FromSequence(range(items)), window, seed) == order_of(
        without_numbers(items), window, seed
    )


@given(items=st.integers(1, 100), window=st.integers(1, 100), seed=seeds)
def test_passes_and_seeds_differ_and_equal_ones_agree(items: int, window: int, seed: int) -> None:
    source = FromSequence(range(items))
    assert order_of(source, window, seed, 3) == order_of(source, window, seed, 3)
    if items > 40 and window > 20:
        assert order_of(source, window, seed, 3) != order_of(source, window, seed, 4)
        assert order_of(source, window, seed, 3) != order_of(source, window, seed ^ 1, 3)


def test_the_order_stays_what_it_is() -> None:
    assert order_of(FromSequence(range(12)), 5, seed=7, number=2) == [1, 2, 0, 3, 5, 4, 6, 8, 7, 10, 9, 11]


def test_a_window_of_everything_gives_every_order_alike() -> None:
    source = FromSequence(range(3))
    orders = Counter(tuple(order_of(source, 3, number=number)) for number in range(1800))
    assert len(orders) == 6
    assert 220 < min(orders.values()) <= max(orders.values()) < 380


@pytest.mark.parametrize("window", [1, 10, 100])
def test_at_most_a_window_is_held_and_half_of_it_mostly(window: int) -> None:
    alive: weakref.WeakSet[Any] = weakref.WeakSet()

    class Item:
        pass

    def begin() -> Iterator[Item]:
        for _ in range(2000):
            item = Item()
            alive.add(item)
            yield item
            del item

    held = []
    for item in LocallyShuffled(FromCallable(Function(begin)), window, 0).run(PassContext()):
        del item
        held.append(len(alive))
    gc.collect()
    assert max(held) <= window
    assert np.mean(held) < 0.55 * window + 1


def test_an_endless_flow_is_shuffled_as_it_comes() -> None:
    source = FromCallable(Function(count))
    items = LocallyShuffled(source, 50, 1).run(PassContext())
    order = np.array(list(islice(items, 5000)))
    assert np.all(np.abs(order - np.arange(5000)) < 50)
    assert np.mean(order != np.arange(5000)) > 0.9


def test_only_numbers_are_shuffled_where_there_are_some() -> None:
    drawn: list[int] = []

    class Noting:
        def __len__(self) -> int:
            return 1000

        def __getitem__(self, number: int) -> int:
            drawn.append(number)
            return number

    items = iter(Flow.from_iterable(Noting()).shuffle(1000))
    first = [next(items) for _ in range(3)]
    assert drawn == first


def test_two_shuffles_in_a_row_are_not_the_same_twice() -> None:
    flow = Flow.from_iterable(range(200))
    once, twice = flow.shuffle(200), flow.shuffle(200).shuffle(200)
    by_once = list(once.at_pass(0))
    assert list(twice.at_pass(0)) != [by_once[n] for n in by_once]


def test_a_source_that_never_changes_stays_one() -> None:
    assert not LocallyShuffled(Items(), 3, 0).never_change
    assert Flow.fake(3, size=(2, 2)).shuffle(3).batches_never_change


@pytest.mark.parametrize("window", [0, -1, 1.5, True, "3", None])
def test_a_window_that_is_none_is_refused(window: Any) -> None:
    with pytest.raises(UsageError, match="a shuffle window must be"):
        Flow.from_iterable([1]).shuffle(window)


@pytest.mark.parametrize("seed", [-1, 1 << 64, 0.5, True])
def test_a_seed_that_is_none_is_refused(seed: Any) -> None:
    with pytest.raises(UsageError, match="seed must be"):
        Flow.from_iterable([1]).shuffle(2, seed=seed)


def test_numpys_integers_are_integers() -> None:
    for source in (FromSequence(range(500)), without_numbers(500)):
        shuffled = LocallyShuffled(source, np.int8(100), np.int64(3))  # type: ignore[arg-type]
        assert list(shuffled.run(PassContext())) == order_of(source, 100, 3)
