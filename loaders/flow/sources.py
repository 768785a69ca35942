"""Sources that are Python's own: sequences, iterables, functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

from ...formats.errors import UsageError
from ..passes import Passes, end
from .functions import Function
from .length import UNKNOWN, Length, exact
from .node import Node
from .running import Pass
from .whole import within


def from_iterable(items: Iterable[Any]) -> Node:
    """The source that these items are. Raises UsageError for what has no items, or but one pass."""
    if isinstance(items, Iterator):
        raise UsageError(
            f"a {type(items).__name__} is an iterator, which has but one pass: give Flow.from_callable a function "
            "that returns a new one (a generator function will do), or Flow.from_iterable a list"
        )
    if isinstance(items, str | bytes | bytearray | Mapping):
        raise UsageError(f"a {type(items).__name__} is one item and not many; give a list of what you mean")
    if hasattr(items, "__getitem__") and _has_length(items):
        return FromSequence(items)
    if isinstance(items, Iterable):
        return FromIterable(items)
    hint = "Flow.from_callable takes functions" if callable(items) else "give a list, or what can be iterated"
    raise UsageError(f"a {type(items).__name__} has no items; {hint}")


def _has_length(items: Any) -> bool:
    try:
        len(items)
    except TypeError:
        return False
    return True


class Source(Node):
    """A node that draws from no other."""

    @property
    def sources(self) -> tuple[Node, ...]:
        return ()


@dataclass(frozen=True)
class FromSequence(Source):
    """``items[0]`` to ``items[len(items) - 1]``; of an array its rows."""

    items: Any

    @property
    def length(self) -> Length:
        return exact(len(self.items))

    @property
    def never_change(self) -> bool:
        return bool(getattr(self.items, "batches_never_change", False))

    def run(self, now: Pass) -> Iterator[Any]:
        yield from map(self._item, range(len(self.items)))

    @property
    def can_pick(self) -> bool:
        return True

    def pick(self, now: Pass, numbers: Iterable[int]) -> Iterator[Any]:
        yield from map(self._item, within(numbers, self.length))

    def _item(self, number: int) -> Any:
        """Has StopIteration come as RuntimeError, since it would end the pass as if there were no more items."""
        try:
            return self.items[number]
        except StopIteration as error:
            raise RuntimeError(
                f"item {number} of the {type(self.items).__name__} raised StopIteration"
            ) from error


@dataclass(frozen=True)
class FromIterable(Source):
    """What iterating ``items`` anew gives in each pass: a set, a Loader, another library's data."""

    items: Iterable[Any]

    @property
    def length(self) -> Length:
        items = Passes(self.items).steady_length
        return UNKNOWN if items is None else exact(items)

    @property
    def never_change(self) -> bool:
        return Passes(self.items).batches_never_change

    def run(self, now: Pass) -> Iterator[Any]:
        """Raises UsageError at the end of a pass that had another number of items than ``len`` said."""
        promised, counted = self.length, count()
        items = Passes(self.items).begin()
        try:
            yield from map(_item, items, counted)
        finally:
            end(items)
        if promised.is_exact and (found := next(counted)) != promised.items:
            raise UsageError(
                f"the {type(self.items).__name__} says that it has {promised.items} items, but pass {now.number} had "
                f"{found}: give Flow.from_callable a function that returns it, for then the length is unknown"
            )


def _item(item: Any, number: int) -> Any:
    return item


@dataclass(frozen=True)
class FromCallable(Source):
    """What ``function()`` returns, called for each pass."""

    function: Function

    @property
    def length(self) -> Length:
        return UNKNOWN

    def run(self, now: Pass) -> Iterator[Any]:
        items = self.function()
        if not isinstance(items, Iterable):
            raise UsageError(f"{self.function.name} returned a {type(items).__name__}, which has no items")
        now.kept.shared(now.place(self), _Last).replace(items, self.function.name)
        yield from Passes(items).begin()


class _Last:
    """The iterator that a function returned last, lest it returns that again: nothing would be left in it."""

    def __init__(self) -> None:
        self._items: Any = None

    def replace(self, items: Iterable[Any], name: str) -> None:
        if items is self._items:
            raise UsageError(
                f"{name} returned the very iterator that it returned before, which has but one pass: have it return "
                "a new one each time"
            )
        self._items = items if isinstance(items, Iterator) else None

    def close(self) -> None:
        self._items = None
