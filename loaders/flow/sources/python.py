"""Sources of Python's kinds: sequences, iterables, functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

from shardprep.formats.errors import UsageError
from shardprep.loaders.batching.passes import Passes, end
from shardprep.loaders.flow.core.checks import within
from shardprep.loaders.flow.core.length import UNKNOWN, Length, exact
from shardprep.loaders.flow.core.node import Node, described
from shardprep.loaders.flow.core.pass_context import PassContext
from shardprep.loaders.flow.core.user_function import Function


def from_iterable(items: Iterable[Any]) -> Node:
    """Return the source for these items. Raises UsageError for an iterator or an object without items."""
    if isinstance(items, Iterator):
        raise UsageError(
            f"a {type(items).__name__} is an iterator, which has only one pass: give Flow.from_callable a function "
            "that returns a new one (a generator function works), or Flow.from_iterable a list"
        )
    if isinstance(items, str | bytes | bytearray | Mapping):
        raise UsageError(f"a {type(items).__name__} is one item, not several; give a list of items")
    if hasattr(items, "__getitem__") and _has_length(items):
        return FromSequence(items)
    if isinstance(items, Iterable):
        return FromIterable(items)
    hint = "Flow.from_callable takes functions" if callable(items) else "give a list or another iterable"
    raise UsageError(f"a {type(items).__name__} has no items; {hint}")


def _has_length(items: Any) -> bool:
    try:
        len(items)
    except TypeError:
        return False
    return True


class FlowSource(Node):
    """A node without sources."""

    @property
    def sources(self) -> tuple[Node, ...]:
        return ()


@dataclass(frozen=True)
class FromSequence(FlowSource):
    """The elements ``items[0]`` to ``items[len(items) - 1]``; of an array, the rows."""

    items: Any

    @property
    def label(self) -> str:
        return f"from_iterable({type(self.items).__name__})"

    @property
    def description(self) -> str:
        return described(self, str(self.length))

    @property
    def length(self) -> Length:
        return exact(len(self.items))

    @property
    def never_change(self) -> bool:
        return bool(getattr(self.items, "batches_never_change", False))

    def run(self, now: PassContext) -> Iterator[Any]:
        yield from map(now.here.timed(self.label, self._item), range(len(self.items)))

    @property
    def can_pick(self) -> bool:
        return True

    def pick(self, now: PassContext, numbers: Iterable[int]) -> Iterator[Any]:
        yield from map(now.here.timed(self.label, self._item), within(numbers, self.length))

    def _item(self, number: int) -> Any:
        """Return the item. Raises StopIteration as RuntimeError, because it would end the pass silently."""
        try:
            return self.items[number]
        except StopIteration as error:
            raise RuntimeError(
                f"item {number} of the {type(self.items).__name__} raised StopIteration"
            ) from error


@dataclass(frozen=True)
class FromIterable(FlowSource):
    """The elements of ``items``, which is iterated once per pass: a set, a Loader, another library's data."""

    items: Iterable[Any]

    @property
    def label(self) -> str:
        return f"from_iterable({type(self.items).__name__})"

    @property
    def description(self) -> str:
        return described(self, str(self.length))

    @property
    def length(self) -> Length:
        items = Passes(self.items).steady_length
        return UNKNOWN if items is None else exact(items)

    @property
    def never_change(self) -> bool:
        return Passes(self.items).batches_never_change

    def run(self, now: PassContext) -> Iterator[Any]:
        """Run one pass. Raises UsageError at its end if the number of items differs from ``len``."""
        promised, counted = self.length, count()
        items = Passes(self.items).begin()
        try:
            yield from map(_item, now.here.timed_draws(self.label, items), counted)
        finally:
            end(items)
        if promised.is_exact and (found := next(counted)) != promised.items:
            raise UsageError(
                f"the {type(self.items).__name__} says that it has {promised.items} items, but pass {now.number} had "
                f"{found}: give Flow.from_callable a function that returns it, then the length is unknown"
            )


def _item(item: Any, number: int) -> Any:
    return item


@dataclass(frozen=True)
class FromCallable(FlowSource):
    """The items of ``function()``, which is called for each pass."""

    function: Function

    @property
    def label(self) -> str:
        return f"from_callable({self.function.name})"

    @property
    def length(self) -> Length:
        return UNKNOWN

    def run(self, now: PassContext) -> Iterator[Any]:
        items = self.function()
        if not isinstance(items, Iterable):
            raise UsageError(f"{self.function.name} returned a {type(items).__name__}, which has no items")
        now.kept.shared(now.place(self), _LastIterator).replace(items, self.function.name)
        yield from now.here.timed_draws(self.label, Passes(items).begin())


class _LastIterator:
    """The iterator that a function returned last, to detect that it is returned again, exhausted."""

    def __init__(self) -> None:
        self._items: Any = None

    def replace(self, items: Iterable[Any], name: str) -> None:
        if items is self._items:
            raise UsageError(
                f"{name} returned the same iterator as in the pass before, and an iterator has only one pass: "
                "return a new one each time"
            )
        self._items = items if isinstance(items, Iterator) else None

    def close(self) -> None:
        self._items = None
