"""Steps that repeat passes, or limit them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

from shardprep.formats.errors import UsageError
from shardprep.loaders.batching.passes import end
from shardprep.loaders.flow.core.checks import checked_int
from shardprep.loaders.flow.core.length import INFINITE, Length
from shardprep.loaders.flow.core.node import Fetched, Node, Step
from shardprep.loaders.flow.core.numbering import Renumbered, RenumberedKeys
from shardprep.loaders.flow.core.pass_context import PassContext


@dataclass(frozen=True)
class Repeat(Step):
    """``passes`` passes of the source in each pass; None repeats without end. See :meth:`.Flow.repeat`.

    Without end, pass p runs the passes p * 2**32, p * 2**32 + 1, ... of the source; a pass of the source
    without items then raises UsageError.
    """

    source: Node
    passes: int | None

    def __post_init__(self) -> None:
        if self.passes is not None:
            object.__setattr__(self, "passes", checked_int(self.passes, "the number of passes", least=0))
        if self.source.length.is_infinite:
            raise UsageError("an infinite flow cannot be repeated; leave out repeat(), or use take(n) before")
        if self.passes is None and self.source.length.is_exact and not self.source.length.items:
            raise UsageError("a flow without items cannot be repeated without end")

    @property
    def length(self) -> Length:
        return INFINITE if self.passes is None else self.source.length.times(self.passes)

    @property
    def never_change(self) -> bool:
        return self.source.never_change

    def run(self, now: PassContext) -> Iterator[Any]:
        for number in self._numbers(now.number):
            items = self.source.run(now.of(self, number=number))
            try:
                first = list(islice(items, 1))
                if not first and self.passes is None:
                    raise UsageError(f"pass {number} of a flow that is repeated without end had no items")
                while first:
                    yield first.pop()
                yield from items
            finally:
                end(items)

    def _numbers(self, number: int) -> Iterable[int]:
        """The numbers of the source's passes in this pass."""
        if self.passes is None:
            return count(number << 32)
        return range(number * self.passes, (number + 1) * self.passes)


@dataclass(frozen=True)
class Take(Renumbered):
    """The first ``count`` items of each pass; the pass ends with the last of them."""

    source: Node
    count: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", checked_int(self.count, "the number of items to take", least=0))

    @classmethod
    def of(cls, source: Node, count: int) -> Take:
        """Return the step; over a fetched source, its items are fetched, too. Raises UsageError."""
        return (TakenKeys if isinstance(source, Fetched) else cls)(source, count)

    @property
    def label(self) -> str:
        return "take"

    @property
    def length(self) -> Length:
        return self.source.length.limited(self.count)

    def numbers(self, now: PassContext, places: Iterable[int]) -> Iterator[int]:
        return iter(places)

    def run(self, now: PassContext) -> Iterator[Any]:
        items = self.drawn(now)
        try:
            yield from islice(items, self.count)
        finally:
            end(items)


class TakenKeys(Take, RenumberedKeys):
    """The first items of a fetched source."""
