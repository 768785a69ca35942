"""Steps from items to batches, and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, repeat
from typing import Any, Literal, Self, get_args

from shardprep.formats.errors import UsageError
from shardprep.loaders.batching.group import grouped, grouped_by_shape
from shardprep.loaders.batching.passes import end
from shardprep.loaders.batching.stack import listed, padded, rows_of, stack
from shardprep.loaders.flow.core.checks import checked_int, within
from shardprep.loaders.flow.core.length import INFINITE, UNKNOWN, Length
from shardprep.loaders.flow.core.node import BatchingSource, Node, Step
from shardprep.loaders.flow.core.numbering import PendingNumbers
from shardprep.loaders.flow.core.pass_context import PassContext
from shardprep.loaders.flow.core.user_function import map_with_notes

Remainder = Literal["keep", "drop", "pad"]


@dataclass(frozen=True)
class Batch(Step):
    """Batches of ``size`` items: new arrays aligned to 64 bytes, or lists. See :meth:`.Flow.batch`.

    Python's numbers become bool, int64, float64 or complex128. Strings and bytes need ``as_list``. A source
    that can make whole batches (:class:`.BatchingSource`) makes them.
    """

    source: Node
    size: int
    remainder: Remainder
    as_list: bool

    @classmethod
    def of(cls, source: Node, size: int, *, remainder: Remainder, as_list: bool) -> Self:
        """Return the step. Raises UsageError."""
        _check(remainder, get_args(Remainder))
        if as_list and remainder == "pad":
            raise UsageError("lists are not padded: leave out as_list, or keep or drop the remainder")
        return cls(source, checked_int(size, "a batch size", least=1), remainder, as_list)

    @property
    def label(self) -> str:
        return f"batch({self.size})"

    @property
    def length(self) -> Length:
        return self.source.length.batches(self.size, drop=self.remainder == "drop")

    @property
    def never_change(self) -> bool:
        return not self.as_list or self.source.never_change

    def run(self, now: PassContext) -> Iterator[Any]:
        if not self.as_list and isinstance(self.source, BatchingSource) and self.source.can_batch:
            return self._made_whole(self.source.batches(now.of(self), self.size, least=self._least))
        return self._made_of(now, self.drawn(now), repeat(self.size), count())

    @property
    def can_pick(self) -> bool:
        return self.source.can_pick

    def pick(self, now: PassContext, numbers: Iterable[int]) -> Iterator[Any]:
        if not self.can_pick:
            return super().pick(now, numbers)
        asked = PendingNumbers(within(numbers, self.length))
        items = self.source.pick(now.of(self), chain.from_iterable(map(self._items_of, asked)))
        begun = PendingNumbers(asked.again)
        return self._made_of(now, items, (len(self._items_of(number)) for number in begun), begun.again)

    def _items_of(self, number: int) -> range:
        """The numbers of the items in this batch; the last batch may have fewer."""
        return range(self.source.length.items)[number * self.size : (number + 1) * self.size]

    def _made_of(
        self, now: PassContext, items: Iterator[Any], sizes: Iterator[int], numbers: Iterator[int]
    ) -> Iterator[Any]:
        try:
            groups = grouped(items, sizes, least=self._least)
            make = listed if self.as_list else lambda rows: self._finished(stack(rows))
            yield from map_with_notes(make, groups, now, numbers, self.label)
        finally:
            end(items)

    def _made_whole(self, batches: Iterator[Any]) -> Iterator[Any]:
        try:
            yield from map(self._finished, batches)
        finally:
            end(batches)

    @property
    def _least(self) -> int:
        """The least number of rows that make a batch."""
        return self.size if self.remainder == "drop" else 1

    def _finished(self, batch: Any) -> Any:
        return padded(batch, self.size) if self.remainder == "pad" else batch


@dataclass(frozen=True)
class BatchByShape(Step):
    """Batches of items of equal shapes. See :meth:`.Flow.batch_by_shape`."""

    source: Node
    size: int
    remainder: Literal["keep", "drop"]

    def __post_init__(self) -> None:
        checked_int(self.size, "a batch size", least=1)
        _check(self.remainder, ("keep", "drop"))

    @property
    def label(self) -> str:
        return f"batch_by_shape({self.size})"

    @property
    def length(self) -> Length:
        least = self.size if self.remainder == "drop" else 1
        return self.source.length.batches(least, drop=True).filtered()

    @property
    def never_change(self) -> bool:
        return True

    def run(self, now: PassContext) -> Iterator[Any]:
        items = self.drawn(now)
        try:
            groups = grouped_by_shape(items, self.size, with_rest=self.remainder == "keep")
            yield from map_with_notes(stack, groups, now, count(), self.label)
        finally:
            end(items)


@dataclass(frozen=True)
class Unbatch(Step):
    """The rows of each batch: views of arrays, elements of lists. UsageError for a batch without rows."""

    source: Node

    @property
    def label(self) -> str:
        return "unbatch"

    @property
    def length(self) -> Length:
        return INFINITE if self.source.length.is_infinite else UNKNOWN

    @property
    def never_change(self) -> bool:
        return self.source.never_change

    def run(self, now: PassContext) -> Iterator[Any]:
        batches = self.drawn(now)
        try:
            yield from chain.from_iterable(map_with_notes(rows_of, batches, now, count(), self.label))
        finally:
            end(batches)


def _check(remainder: object, known: Sequence[str]) -> None:
    if remainder not in known:
        raise UsageError(f"remainder must be one of {', '.join(known)}, not {remainder!r}")
