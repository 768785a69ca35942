"""Shuffling within a window: the orders, the items held, and that numbers and items are shuffled alike."""

from __future__ import annotations

from shardprep.loaders import Flow
from shardprep.loaders.flow.node import Node
from shardprep.loaders.flow.passes import PassContext
from shardprep.loaders.flow.sources import FromSequence
from shardprep.loaders.flow.steps import LocallyShuffled
from support.flow_members import Items


def order_of(source: Node, window: int, seed: int = 0, number: int = 0) -> list[int]:
    return list(LocallyShuffled(source, window, seed).run(PassContext(number)))


def test_the_order_stays_what_it_is() -> None:
    assert order_of(FromSequence(range(12)), 5, seed=7, number=2) == [1, 2, 0, 3, 5, 4, 6, 8, 7, 10, 9, 11]


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


def test_a_source_that_never_changes_stays_one() -> None:
    assert not LocallyShuffled(Items(), 3, 0).never_change
    assert Flow.fake(3, size=(2, 2)).shuffle(3).batches_never_change
