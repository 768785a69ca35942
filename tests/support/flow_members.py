"""The steps of flows, each made over a source, for the tests of their contract; and that source."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from shardprep.loaders.batches.stack import Padding
from shardprep.loaders.flow.combine import Choose, Concat, Mix, Zip
from shardprep.loaders.flow.map import Filter, Map, MapComponent, Select
from shardprep.loaders.flow.node import INFINITE, Length, Node, exact, within
from shardprep.loaders.flow.passes import Function, PassContext
from shardprep.loaders.flow.prefetch import Prefetch
from shardprep.loaders.flow.steps import (
    Batch,
    BatchByShape,
    Cache,
    LocallyShuffled,
    Print,
    Remainder,
    Repeat,
    Skip,
    Take,
    Unbatch,
)
from shardprep.loaders.flow.thread_map import ThreadMap

Item = tuple[np.ndarray, int]


def item_of(number: int) -> Item:
    return np.full(2, number, np.float32), number


class SourceFailed(Exception):
    pass


@dataclass(frozen=True)
class Items(Node):
    """``count`` items, None for endless ones; the n-th is (float32 [2] of n, n), a new one at each draw.

    ``begun`` and ``ended`` are the numbers of the passes that began and ended, ``threads`` the threads that
    drew. Drawing item ``fails_at`` raises SourceFailed.
    """

    count: int | None = 20
    can_pick: bool = True  # type: ignore[misc]
    fails_at: int | None = None
    begun: list[int] = field(default_factory=list, compare=False)
    ended: list[int] = field(default_factory=list, compare=False)
    threads: set[int] = field(default_factory=set, compare=False)

    @property
    def sources(self) -> tuple[Node, ...]:
        return ()

    @property
    def length(self) -> Length:
        return INFINITE if self.count is None else exact(self.count)

    def run(self, now: PassContext) -> Iterator[Item]:
        return self._items(now, self._numbers())

    def pick(self, now: PassContext, numbers: Iterable[int]) -> Iterator[Item]:
        return self._items(now, within(numbers, self.length)) if self.can_pick else super().pick(now, numbers)

    def _numbers(self) -> Iterator[int]:
        number = 0
        while number != self.count:
            yield number
            number += 1

    def _items(self, now: PassContext, numbers: Iterator[int]) -> Iterator[Item]:
        self.begun.append(now.number)
        try:
            yield from map(self._item, numbers)
        finally:
            self.ended.append(now.number)

    def _item(self, number: int) -> Item:
        self.threads.add(threading.get_ident())
        if number == self.fails_at:
            raise SourceFailed
        return item_of(number)


def plain(item: Any) -> Any:
    """A form of the item that can be compared."""
    if isinstance(item, np.ndarray):
        return item.dtype.str, item.tolist()
    if isinstance(item, dict):
        return {name: plain(part) for name, part in item.items()}
    if isinstance(item, tuple | list):
        return [plain(part) for part in item]
    return item


class Member(NamedTuple):
    """A step: ``make`` makes it over a source; ``holds`` says that it keeps references to what it yielded."""

    name: str
    make: Callable[[Node], Node]
    holds: bool = False


MEMBERS: list[Member] = [
    Member("shuffle", lambda source: LocallyShuffled(source, 7, 1)),
    Member("shuffle of all", lambda source: LocallyShuffled(source, 1000, 1)),
    Member("repeat", lambda source: Repeat(source, 3)),
    Member("repeat for ever", lambda source: Take(Repeat(source, None), 50)),
    Member("take", lambda source: Take(source, 7)),
    Member("take more", lambda source: Take(source, 1000)),
    Member("skip", lambda source: Skip(source, 3)),
    Member("concat", lambda source: Concat((Take(source, 5), source))),
    Member("zip", lambda source: Zip((source, LocallyShuffled(source, 4, 2), Take(source, 15)))),
    Member("mix", lambda source: Mix((source, Take(source, 9)), None, 3)),
    Member("mix with weights", lambda source: Mix((source, Take(source, 9)), (1.5, 0.3), 3)),
    Member("choose", lambda source: Choose((source, Repeat(Take(source, 9), None)), (0.2, 0.8), 4)),
    Member("cache", Cache, holds=True),
    Member("prefetch", lambda source: Prefetch(source, 3)),
    Member("prefetch one", lambda source: Prefetch(source, 1)),
]


# Steps on each item, and batches


def negated(item: Item) -> Item:
    return -item[0], -item[1]


def jittered(item: Item, rng: np.random.Generator) -> Item:
    return item[0] + rng.random(2, np.float32), int(rng.integers(1 << 40))


def none_of_each_third(item: Item) -> Item | None:
    return item if item[1] % 3 else None


def is_odd(item: Item) -> bool:
    return item[1] % 2 == 1


def reshaped(item: Item) -> np.ndarray:
    """An array of one of three shapes."""
    return np.full(1 + item[1] % 3, item[1])


def doubled(array: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return 2 * array + rng.random(array.shape, np.float32)


def mapped(
    source: Node, function: Callable[..., Any], *, drop_none: bool = False, random: bool = False
) -> Node:
    return Map(source, Function(function), drop_none=drop_none, random=random, seed=7)


def mapped_in_threads(
    source: Node, function: Callable[..., Any], *, drop_none: bool = False, random: bool = False
) -> Node:
    call = Function(function)
    return ThreadMap(source, call, threads=3, ordered=True, drop_none=drop_none, random=random, seed=7)


def batched(source: Node, remainder: Remainder = "keep", *, as_list: bool = False) -> Node:
    return Batch.of(source, 3, remainder=remainder, as_list=as_list)


MEMBERS += [
    Member("map", lambda source: mapped(source, negated)),
    Member("map, random", lambda source: mapped(source, jittered, random=True)),
    Member("map, drop_none", lambda source: mapped(source, none_of_each_third, drop_none=True)),
    Member("map, threads", lambda source: mapped_in_threads(source, negated)),
    Member("map, threads, random", lambda source: mapped_in_threads(source, jittered, random=True)),
    Member(
        "map, threads, drop_none",
        lambda source: mapped_in_threads(source, none_of_each_third, drop_none=True),
    ),
    Member("filter", lambda source: Filter(source, Function(is_odd))),
    Member("map_component", lambda source: MapComponent(source, Function(doubled), 0, random=True, seed=3)),
    Member("select", lambda source: Select(source, (0, -1, 0))),
    Member("batch, keep", lambda source: batched(source)),
    Member("batch, drop", lambda source: batched(source, "drop")),
    Member("batch, pad", lambda source: batched(source, "pad")),
    Member("batch, as_list", lambda source: batched(source, as_list=True)),
    Member("pad", lambda source: mapped(batched(mapped(source, reshaped), as_list=True), Padding(-1))),
    Member("batch of map", lambda source: batched(mapped(source, jittered, random=True))),
    Member("batch_by_shape, keep", lambda source: BatchByShape(mapped(source, reshaped), 2, "keep")),
    Member("batch_by_shape, drop", lambda source: BatchByShape(mapped(source, reshaped), 2, "drop")),
    Member("unbatch", lambda source: Unbatch(batched(source))),
    Member("print", lambda source: Print(source, 1)),
]
