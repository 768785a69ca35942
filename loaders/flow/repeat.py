"""More passes in one, or fewer items of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

from ...formats.errors import UsageError
from ..passes import end
from .length import INFINITE, Length
from .node import Fetched, Node, Step
from .renumbered import Renumbered, RenumberedKeys
from .running import Pass
from .whole import whole


@dataclass(frozen=True)
class Repeat(Step):
    """``passes`` passes of the source in each pass, None for endless ones. See :meth:`.Flow.repeat`.

    Endless ones of pass p are p * 2**32, p * 2**32 + 1, ...; one without any item raises UsageError.
    """

    source: Node
    passes: int | None

    def __post_init__(self) -> None:
        if self.passes is not None:
            object.__setattr__(self, "passes", whole(self.passes, "the number of passes", least=0))
        if self.source.length.is_infinite:
            raise UsageError(
                "an infinite flow has no end to be repeated after; leave out repeat(), or take(n) before"
            )
        if self.passes is None and self.source.length.is_exact and not self.source.length.items:
            raise UsageError("a flow without items cannot be repeated for ever")

    @property
    def length(self) -> Length:
        return INFINITE if self.passes is None else self.source.length.times(self.passes)

    @property
    def never_change(self) -> bool:
        return self.source.never_change

    def run(self, now: Pass) -> Iterator[Any]:
        for number in self._numbers(now.number):
            items = self.source.run(now.of(self, number=number))
            try:
                first = list(islice(items, 1))
                if not first and self.passes is None:
                    raise UsageError(f"pass {number} of a flow that is repeated for ever had no items")
                while first:
                    yield first.pop()
                yield from items
            finally:
                end(items)

    def _numbers(self, number: int) -> Iterable[int]:
        """Of the passes of the source that this one consists of."""
        if self.passes is None:
            return count(number << 32)
        return range(number * self.passes, (number + 1) * self.passes)


@dataclass(frozen=True)
class Take(Renumbered):
    """The first ``count`` items of each pass, which ends with the last of them."""

    source: Node
    count: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", whole(self.count, "the number of items to take", least=0))

    @classmethod
    def of(cls, source: Node, count: int) -> Take:
        """Over fetched items, one whose own are fetched where they are needed. Raises UsageError."""
        return (TakenKeys if isinstance(source, Fetched) else cls)(source, count)

    @property
    def length(self) -> Length:
        return self.source.length.limited(self.count)

    def numbers(self, now: Pass, places: Iterable[int]) -> Iterator[int]:
        return iter(places)

    def run(self, now: Pass) -> Iterator[Any]:
        items = self.drawn(now)
        try:
            yield from islice(items, self.count)
        finally:
            end(items)


class TakenKeys(Take, RenumberedKeys):
    """The same over a source whose items are fetched."""
