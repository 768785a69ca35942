"""The steps of one pass: missing, assigned, arrived and taken ones. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class Steps(Generic[T]):
    """The steps ``start`` to ``total`` - 1 of a pass, without those ``taken`` before.

    ``total`` is None while it is unknown. Items are taken in the order of the steps, or, unless ``ordered``,
    in the order of arrival. Each step is taken once, however often it arrives. Not thread-safe.
    """

    def __init__(
        self, *, start: int = 0, total: int | None, taken: Collection[int] = (), ordered: bool = True
    ) -> None:
        self.due = start
        self.total = total
        self.ordered = ordered
        self._taken = set(taken)  # beyond ``due``
        self._arrived: dict[int, T] = {}
        self._unassigned: list[int] = []  # a heap; a step in it may have arrived since
        self._next = start  # the first that was never assigned
        self._pass_over_taken()

    @property
    def is_over(self) -> bool:
        """Whether all steps were taken."""
        return self.total is not None and self.due >= self.total

    @property
    def taken(self) -> list[int]:
        """The steps after ``due`` that were already taken."""
        return sorted(self._taken)

    @property
    def has_next(self) -> bool:
        """Whether an item can be taken."""
        return self.due in self._arrived if self.ordered else bool(self._arrived)

    def is_missing(self, step: int) -> bool:
        """Return whether a step has not arrived, and is one of the pass as far as known."""
        beyond = self.total is not None and step >= self.total
        return self.due <= step and not beyond and step not in self._arrived and step not in self._taken

    def assign(self, most: int, *, below: int, peer: bytes = b"") -> range:
        """Assign the first consecutive missing steps that are not assigned to ``peer``; perhaps none."""
        first = self._first_unassigned()
        if first >= below:
            return range(0)
        stop = first
        while stop < min(first + most, below) and self._first_unassigned() == stop and self.is_missing(stop):
            self._mark_assigned(stop)
            stop += 1
        return range(first, stop)

    def goes_beyond(self, step: int) -> bool:
        """Return whether the next step to assign is at or after ``step``."""
        first = self._first_unassigned()
        return first >= step and (self.total is None or first < self.total)

    def unassign(self, steps: Iterable[int]) -> None:
        """Mark steps as not assigned; those that are missing are assigned next."""
        for step in filter(self.is_missing, steps):
            heapq.heappush(self._unassigned, step)

    def release(self, peer: bytes, *, one: bool = False) -> None:
        """Leave what further steps this peer would get to others, or only ``one`` part of it."""

    def arrive(self, step: int, item: T) -> bool:
        """Add an item. Return False where its step is not missing; the item is dropped then."""
        if not self.is_missing(step):
            return False
        self._arrived[step] = item
        return True

    def take(self) -> T:
        """Take the next item. Raises KeyError unless :attr:`has_next`."""
        step = self.due if self.ordered else next(iter(self._arrived), self.due)
        item = self._arrived.pop(step)
        self._taken.add(step)
        self._pass_over_taken()
        return item

    def end_at(self, total: int) -> bool:
        """Set the number of steps; return False where it cannot be right."""
        known = max([self.due - 1, *self._arrived, *self._taken])
        if self.total not in (None, total) or total <= known:
            return False
        self.total = total
        return True

    def _first_unassigned(self) -> int:
        while self._unassigned and not self.is_missing(self._unassigned[0]):
            heapq.heappop(self._unassigned)
        self._next = max(self._next, self.due)
        while self._next in self._taken or self._next in self._arrived:
            self._next += 1
        return self._unassigned[0] if self._unassigned else self._next

    def _mark_assigned(self, step: int) -> None:
        while self._unassigned and self._unassigned[0] == step:
            heapq.heappop(self._unassigned)
        self._next = max(self._next, step + 1)

    def _pass_over_taken(self) -> None:
        while self.due in self._taken:
            self._taken.remove(self.due)
            self.due += 1
