"""A step that shuffles within a window."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import Any

from shardprep.loaders.batching.passes import end
from shardprep.loaders.flow.core.checks import checked_int, seed_of
from shardprep.loaders.flow.core.node import Fetched, Node
from shardprep.loaders.flow.core.numbering import Renumbered, RenumberedKeys
from shardprep.loaders.flow.core.pass_context import PassContext
from shardprep.loaders.order.displaced_order import MAX_RECORDS, DisplacedOrder

from .weighted_choice import words


@dataclass(frozen=True)
class LocallyShuffled(Renumbered):
    """The items i, sorted by i + ``window`` * u with random u in [0, 1). See :meth:`.Flow.shuffle`.

    u is uniform and independent for each item. Where the source can pick, a window of all items gives every
    order with the same probability.
    """

    source: Node
    window: int
    seed: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "window", checked_int(self.window, "a shuffle window", least=1))
        seed_of(self.seed)

    @classmethod
    def of(cls, source: Node, window: int, seed: int) -> LocallyShuffled:
        """Return the step; over a fetched source, its items are fetched, too. Raises UsageError."""
        return (ShuffledKeys if isinstance(source, Fetched) else cls)(source, window, seed)

    @property
    def label(self) -> str:
        return "shuffle"

    @property
    def can_pick(self) -> bool:
        return self.source.can_pick and self.source.length.items <= MAX_RECORDS

    def numbers(self, now: PassContext, places: Iterable[int]) -> Iterator[int]:
        yield from self._order(now).each(places)

    def _order(self, now: PassContext) -> DisplacedOrder:
        items = self.source.length.items
        return DisplacedOrder(items, window=min(self.window, items), bits=now.bits(self, self.seed))

    def run(self, now: PassContext) -> Iterator[Any]:
        if self.can_pick:
            order = self._order(now)
            return self.source.pick(now.of(self), order.each(range(len(order))))
        return self._from_a_heap(now)

    def _from_a_heap(self, now: PassContext) -> Iterator[Any]:
        """Yield each item as soon as no item that is not yet drawn can precede it."""
        heap: list[_Entry] = []
        items = self.drawn(now)
        try:
            for entry in map(self._entry, count(), words(now.bits(self, self.seed)), items):
                heappush(heap, entry)
                next_key = entry[1] + 1 << 32
                del entry
                while heap and heap[0][0] <= next_key:
                    yield heappop(heap)[2]
        finally:
            end(items)
        while heap:
            yield heappop(heap)[2]

    def _entry(self, number: int, word: int, item: Any) -> _Entry:
        return (number << 32) + self.window * (word >> 32), number, item


class ShuffledKeys(LocallyShuffled, RenumberedKeys):
    """A shuffled fetched source."""


_Entry = tuple[int, int, Any]  # key, number, item; numbers are unique, so that items are never compared
