"""Items together with their numbers, in a whole pass or picked."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any, cast

from .checks import within
from .node import Fetch, Fetched, Step
from .pass_context import PassContext


class PendingNumbers:
    """The numbers that a source draws; each is kept until its item has been yielded.

    Iterate it once, in any thread and any number of items ahead. ``again`` yields the drawn numbers a second
    time.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        self._numbers = numbers
        self._ahead: deque[int] = deque()

    def __iter__(self) -> Iterator[int]:
        for number in self._numbers:
            self._ahead.append(number)
            yield number

    @property
    def again(self) -> Iterator[int]:
        """The numbers that were drawn and not yet yielded here."""
        return iter(self._ahead.popleft, None)


def numbered(
    step: Step, now: PassContext, numbers: Iterable[int] | None = None
) -> tuple[Iterator[Any], Iterator[int]]:
    """Return two iterators: over the source's items, all or those of ``numbers``; and over their numbers.

    Draw the item first, then its number. The caller ends the items (:func:`.passes.end`).
    """
    if numbers is None:
        return step.drawn(now), count()
    asked = PendingNumbers(numbers)
    return step.source.pick(now.of(step), asked), asked.again


class Renumbered(Step):
    """A step that yields its source's items at other places."""

    @abstractmethod
    def numbers(self, now: PassContext, places: Iterable[int]) -> Iterator[int]:
        """The numbers in the source of the items at these places. Called where the source can pick."""

    @property
    def never_change(self) -> bool:
        return self.source.never_change

    @property
    def can_pick(self) -> bool:
        return self.source.can_pick

    def pick(self, now: PassContext, numbers: Iterable[int]) -> Iterator[Any]:
        if not self.can_pick:
            return super().pick(now, numbers)
        return self.source.pick(now.of(self), self.numbers(now, within(numbers, self.length)))


class RenumberedKeys(Renumbered, Fetched):
    """A renumbering step over a :class:`Fetched` source; its own items are fetched, too."""

    @property
    def _fetched(self) -> Fetched:
        return cast("Fetched", self.source)

    def fetch(self) -> Fetch:
        return self._fetched.fetch()

    def keys(self, now: PassContext, numbers: Iterable[int]) -> Iterator[Any]:
        return self._fetched.keys(now.of(self), self.numbers(now, within(numbers, self.length)))
