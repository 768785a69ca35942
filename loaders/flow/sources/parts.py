"""A source in parts, each of which can be made on its own, on any machine."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, runtime_checkable

from shardprep.formats.errors import UsageError
from shardprep.loaders.batching.passes import Passes, end
from shardprep.loaders.flow.core.checks import checked_int
from shardprep.loaders.flow.core.length import UNKNOWN, Length
from shardprep.loaders.flow.core.pass_context import PassContext
from shardprep.loaders.flow.core.user_function import ErrorNote, Function

from .python import FlowSource


@runtime_checkable
class Part(Protocol):
    """A flow that can be a part of another one."""

    def as_part(self, now: PassContext, number: int) -> Iterator[Any]:
        """Run the pass as the part with this number."""


@dataclass(frozen=True)
class FromParts(FlowSource):
    """One item of ``function(0)``, ``function(1)``, ... in turn. See :meth:`.Flow.from_parts`."""

    function: Function
    parts: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", checked_int(self.parts, "the number of parts", least=1))

    @property
    def label(self) -> str:
        return f"from_parts({self.function.name})"

    @property
    def length(self) -> Length:
        return UNKNOWN

    def run(self, now: PassContext) -> Iterator[Any]:
        with ExitStack() as opened:
            due = deque(self.part(now, number) for number in range(self.parts))
            for items in due:
                opened.callback(end, items)
            while due:
                items = due.popleft()
                if held := list(islice(items, 1)):
                    due.append(items)
                    yield held.pop()

    def part(self, now: PassContext, number: int) -> Iterator[Any]:
        """Run the part with this number. Closing or dropping the iterator releases what it uses."""
        return now.here.timed_draws(self.label, self._part(now, number))

    def _part(self, now: PassContext, number: int) -> Iterator[Any]:
        with ErrorNote(now, number, self.label):
            items = self.function(number)
        if isinstance(items, Part):
            yield from items.as_part(now, number)
            return
        if not isinstance(items, Iterable):
            raise UsageError(f"{self.function.name} returned a {type(items).__name__}, which has no items")
        begun = Passes(items).begin()
        try:
            yield from begun
        finally:
            end(begun)
