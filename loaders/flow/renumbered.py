"""Steps that only change which items come when: where the source has numbers, these are all that is touched."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, cast

from .node import Fetch, Fetched, Step
from .running import Pass
from .whole import within


class Renumbered(Step):
    """A step whose items are its source's, at other places."""

    @abstractmethod
    def numbers(self, now: Pass, places: Iterable[int]) -> Iterator[int]:
        """The numbers that the items at these places have in the source, which can pick."""

    @property
    def never_change(self) -> bool:
        return self.source.never_change

    @property
    def can_pick(self) -> bool:
        return self.source.can_pick

    def pick(self, now: Pass, numbers: Iterable[int]) -> Iterator[Any]:
        if not self.can_pick:
            return super().pick(now, numbers)
        return self.source.pick(now.of(self), self.numbers(now, within(numbers, self.length)))


class RenumberedKeys(Renumbered, Fetched):
    """Such a step over a :class:`Fetched` source: so are its own items."""

    @property
    def _fetched(self) -> Fetched:
        return cast("Fetched", self.source)

    def fetch(self) -> Fetch:
        return self._fetched.fetch()

    def keys(self, now: Pass, numbers: Iterable[int]) -> Iterator[Any]:
        return self._fetched.keys(now.of(self), self.numbers(now, within(numbers, self.length)))
