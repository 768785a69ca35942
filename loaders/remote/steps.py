"""The steps of one pass: which are wanted, which have come, which were delivered. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class Steps(Generic[T]):
    """The steps ``start`` to ``total`` - 1 of a pass, less those ``taken`` already; ``total`` None is unknown yet.

    What comes is taken in the order of the steps, or, unless ``ordered``, in the order in which it comes. Each
    step is taken once, whatever comes how often. Not thread-safe.
    """

    def __init__(
        self, *, start: int = 0, total: int | None, taken: Collection[int] = (), ordered: bool = True
    ) -> None:
        self.due = start
        self.total = total
        self._ordered = ordered
        self._taken = set(taken)  # beyond ``due``
        self._stock: dict[int, T] = {}
        self._given_back: list[int] = []  # a heap, in which a step may have come meanwhile
        self._next = start  # the first that nobody was ever asked for
        self._pass_over_taken()

    @property
    def is_over(self) -> bool:
        """Whether all were taken."""
        return self.total is not None and self.due >= self.total

    @property
    def taken(self) -> list[int]:
        """The steps after ``due`` that were taken before it."""
        return sorted(self._taken)

    @property
    def has_next(self) -> bool:
        """Whether one can be taken."""
        return self.due in self._stock if self._ordered else bool(self._stock)

    def is_missing(self, step: int) -> bool:
        """Whether it has not come, and is one of the pass as far as known."""
        beyond = self.total is not None and step >= self.total
        return self.due <= step and not beyond and step not in self._stock and step not in self._taken

    def ask(self, most: int, *, below: int) -> range:
        """Consecutive missing steps that nobody is asked for now, the first ones; empty where there are none."""
        first = self._first_wanted()
        if first >= below:
            return range(0)
        stop = first
        while stop < min(first + most, below) and self._first_wanted() == stop and self.is_missing(stop):
            self._was_asked(stop)
            stop += 1
        return range(first, stop)

    def goes_beyond(self, step: int) -> bool:
        """Whether what is to be asked for next comes at or after that step."""
        first = self._first_wanted()
        return first >= step and (self.total is None or first < self.total)

    def give_back(self, steps: Iterable[int]) -> None:
        """Nobody makes these any more; those that are missing are the next to be asked for."""
        for step in filter(self.is_missing, steps):
            heapq.heappush(self._given_back, step)

    def arrive(self, step: int, item: T) -> bool:
        """False for one that is not missing; its item is dropped."""
        if not self.is_missing(step):
            return False
        self._stock[step] = item
        return True

    def take(self) -> T:
        """The next item. KeyError unless :attr:`has_next`."""
        step = self.due if self._ordered else next(iter(self._stock), self.due)
        item = self._stock.pop(step)
        self._taken.add(step)
        self._pass_over_taken()
        return item

    def end_at(self, total: int) -> bool:
        """The pass is found to have so many steps; False where that cannot be."""
        known = max([self.due - 1, *self._stock, *self._taken])
        if self.total not in (None, total) or total <= known:
            return False
        self.total = total
        return True

    def _first_wanted(self) -> int:
        while self._given_back and not self.is_missing(self._given_back[0]):
            heapq.heappop(self._given_back)
        self._next = max(self._next, self.due)
        while self._next in self._taken or self._next in self._stock:
            self._next += 1
        return self._given_back[0] if self._given_back else self._next

    def _was_asked(self, step: int) -> None:
        while self._given_back and self._given_back[0] == step:
            heapq.heappop(self._given_back)
        self._next = max(self._next, step + 1)

    def _pass_over_taken(self) -> None:
        while self.due in self._taken:
            self._taken.remove(self.due)
            self.due += 1
