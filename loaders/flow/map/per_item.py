"""Steps that make one result from each item."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

from shardprep.loaders.batching.passes import end
from shardprep.loaders.flow.core.node import Step
from shardprep.loaders.flow.core.numbering import numbered
from shardprep.loaders.flow.core.pass_context import PassContext


class PerItem(Step):
    """A step with an n-th result that depends on its source's n-th item only."""

    @abstractmethod
    def result(self, now: PassContext, number: int, item: Any) -> Any:
        """The result for the item with this number in this pass."""

    def wanted(self, results: Iterator[Any]) -> Iterator[Any]:
        """The results that are yielded: all."""
        return results

    def run(self, now: PassContext) -> Iterator[Any]:
        return self.results(now)

    @property
    def can_pick(self) -> bool:
        return self.source.can_pick

    def pick(self, now: PassContext, numbers: Iterable[int]) -> Iterator[Any]:
        return self.results(now, numbers) if self.can_pick else super().pick(now, numbers)

    def results(self, now: PassContext, numbers: Iterable[int] | None = None) -> Iterator[Any]:
        """The results of all items, or of those picked. A yielded result is not referenced here any more."""
        items, places = numbered(self, now, numbers)
        result = now.here.timed(self.label, lambda item, number: self.result(now, number, item))
        try:
            # a for loop would keep a reference to the item
            yield from self.wanted(map(result, items, places))
        finally:
            end(items)
