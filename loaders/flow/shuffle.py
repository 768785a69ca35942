"""Shuffling within a window."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import Any

from ..order import MAX_RECORDS, Records, displaced
from ..passes import end
from .lots import words
from .node import Fetched, Node
from .renumbered import Renumbered, RenumberedKeys
from .running import Pass
from .whole import seed_of, whole

CHUNK = 4096


@dataclass(frozen=True)
class LocallyShuffled(Renumbered):
    """The items ordered by i + ``window`` * u, with u uniform in [0, 1) for each i. See :meth:`.Flow.shuffle`.

    Where the source can pick, a window of all items gives every order with the same probability.
    """

    source: Node
    window: int
    seed: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "window", whole(self.window, "a shuffle window", least=1))
        seed_of(self.seed)

    @classmethod
    def of(cls, source: Node, window: int, seed: int) -> LocallyShuffled:
        """Over fetched items, one whose own are fetched where they are needed. Raises UsageError."""
        return (ShuffledKeys if isinstance(source, Fetched) else cls)(source, window, seed)

    @property
    def can_pick(self) -> bool:
        return self.source.can_pick and self.source.length.items <= MAX_RECORDS

    def numbers(self, now: Pass, places: Iterable[int]) -> Iterator[int]:
        yield from map(self._order(now).item, places)

    def _order(self, now: Pass) -> Records:
        items = self.source.length.items
        return displaced(items, window=min(self.window, items), bits=now.bits(self, self.seed))

    def run(self, now: Pass) -> Iterator[Any]:
        if self.can_pick:
            return self.source.pick(now.of(self), _listed(self._order(now)))
        return self._from_a_heap(now)

    def _from_a_heap(self, now: Pass) -> Iterator[Any]:
        """An item comes as soon as none that is still to be drawn can come before it."""
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
    """The same over a source whose items are fetched."""


_Entry = tuple[int, int, Any]  # key, number, item; no two have one number, so that items are never compared


def _listed(order: Records) -> Iterator[int]:
    for start in range(0, len(order), CHUNK):
        yield from order[start : start + CHUNK].tolist()
