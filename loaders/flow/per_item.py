"""Steps that make one thing of each item."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

from ..passes import end
from .node import Step
from .numbered import numbered
from .running import Pass


class PerItem(Step):
    """A step whose n-th result is made of its source's n-th item, and of nothing else."""

    @abstractmethod
    def result(self, now: Pass, number: int, item: Any) -> Any:
        """What becomes of the item that has this number in this pass."""

    def wanted(self, results: Iterator[Any]) -> Iterator[Any]:
        """Those results that are yielded: all."""
        return results

    def run(self, now: Pass) -> Iterator[Any]:
        return self.results(now)

    @property
    def can_pick(self) -> bool:
        return self.source.can_pick

    def pick(self, now: Pass, numbers: Iterable[int]) -> Iterator[Any]:
        return self.results(now, numbers) if self.can_pick else super().pick(now, numbers)

    def results(self, now: Pass, numbers: Iterable[int] | None = None) -> Iterator[Any]:
        """Of all items, or those picked; nothing is held once it was yielded (a loop would hold it)."""
        items, places = numbered(self, now, numbers)
        try:
            yield from self.wanted(map(lambda item, number: self.result(now, number, item), items, places))
        finally:
            end(items)
