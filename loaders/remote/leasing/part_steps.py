"""The steps of a pass in parts, each of which one sender makes at a time."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Self, TypeVar

from .step_tracker import Steps

T = TypeVar("T")


@dataclass
class PartLease:
    """A part: the peer that makes it, and its steps that are not assigned.

    ``first`` is the first step that was never assigned, ``again`` a heap of others. ``end`` is the step after
    the last one; None while it is unknown.
    """

    first: int
    owner: bytes | None = None
    again: list[int] = field(default_factory=list)
    end: int | None = None


class PartSteps(Steps[T]):
    """Steps from ``start`` on, of which step n belongs to part n % ``parts``; parts end one by one.

    A peer gets steps of the parts that it has, then of one that no peer has. A peer without either takes a
    part from the peer with the most, if that has two more than itself.
    """

    def __init__(
        self, parts: int, *, start: int = 0, taken: Collection[int] = (), ordered: bool = True
    ) -> None:
        self._parts = [PartLease(start + (part - start) % parts) for part in range(parts)]
        super().__init__(start=start, total=None, taken=taken, ordered=ordered)

    @classmethod
    def of(cls, steps: Steps[T], parts: int) -> Self:
        """Return the steps of a pass of which none was assigned, in parts."""
        return cls(parts, start=steps.due, taken=steps.taken, ordered=steps.ordered)

    def is_missing(self, step: int) -> bool:
        return super().is_missing(step) and not self._is_beyond(step)

    def assign(self, most: int, *, below: int, peer: bytes = b"") -> range:
        part = self._part_for(peer, below) if most > 0 else None
        if part is None:
            return range(0)
        part.owner = peer
        step = self._next_of(part)
        if part.again and part.again[0] == step:
            heapq.heappop(part.again)
        else:
            part.first = step + len(self._parts)
        return range(step, step + 1)

    def goes_beyond(self, step: int) -> bool:
        open_steps = [self._next_of(part) for part in self._parts if not self._has_ended(part)]
        return bool(open_steps) and min(open_steps) >= step

    def unassign(self, steps: Iterable[int]) -> None:
        for step in filter(self.is_missing, steps):
            heapq.heappush(self._parts[step % len(self._parts)].again, step)

    def release(self, peer: bytes, *, one: bool = False) -> None:
        own = [part for part in self._parts if part.owner == peer and not self._has_ended(part)]
        for part in own[1:][:1] if one else own:
            part.owner = None

    def end_at(self, total: int) -> bool:
        part = self._parts[total % len(self._parts)]
        known = [step for step in (*self._arrived, *self._taken) if (step - total) % len(self._parts) == 0]
        if part.end not in (None, total) or total <= max(known, default=-1):
            return False
        part.end = total
        ends = [part.end for part in self._parts]
        if None not in ends:
            last = max(end for end in ends if end is not None) - len(self._parts)
            self.total = max(last + 1, self.due)
        self._pass_over_taken()
        return True

    def _part_for(self, peer: bytes, below: int) -> PartLease | None:
        """The part of which the peer gets the next step."""
        ready = [part for part in self._parts if self._is_ready(part, below)]
        own = [part for part in ready if part.owner == peer]
        free = [part for part in ready if part.owner is None]
        if not own and not free:
            free = self._from_the_one_with_most(ready, self._held_by(peer))
        return min(own or free, key=self._next_of, default=None)

    def _from_the_one_with_most(self, ready: list[PartLease], own: int) -> list[PartLease]:
        owners = {part.owner for part in ready if part.owner is not None}
        most = max(owners, key=self._held_by, default=b"")
        return [part for part in ready if part.owner == most][-1:] if self._held_by(most) >= own + 2 else []

    def _held_by(self, peer: bytes) -> int:
        return sum(part.owner == peer and not self._has_ended(part) for part in self._parts)

    def _is_ready(self, part: PartLease, below: int) -> bool:
        return not self._has_ended(part) and self._next_of(part) < below

    def _has_ended(self, part: PartLease) -> bool:
        """Whether the part has no more steps to assign."""
        return part.end is not None and self._next_of(part) >= part.end

    def _next_of(self, part: PartLease) -> int:
        """The first step of the part that is missing and not assigned; perhaps beyond its end."""
        while part.again and not self.is_missing(part.again[0]):
            heapq.heappop(part.again)
        while part.first < self.due or part.first in self._arrived or part.first in self._taken:
            part.first += len(self._parts)
        return part.again[0] if part.again else part.first

    def _is_beyond(self, step: int) -> bool:
        end = self._parts[step % len(self._parts)].end
        return end is not None and step >= end

    def _pass_over_taken(self) -> None:
        while not self.is_over and (self.due in self._taken or self._is_beyond(self.due)):
            self._taken.discard(self.due)
            self.due += 1
