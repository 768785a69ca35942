"""The nodes of a flow (sources and steps), their lengths, and items by number."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from enum import Enum
from functools import partial
from itertools import count, islice
from types import UnionType
from typing import Any, ClassVar, cast

from shardprep.formats.errors import UsageError
from shardprep.formats.records.schema import is_whole
from shardprep.formats.runtime.files import cached_property
from shardprep.loaders.batches.passes import ending
from shardprep.loaders.flow.passes import PassContext


class LengthKind(Enum):
    """How much is known about a length."""

    EXACT = "exactly"
    AT_MOST = "at most"
    UNKNOWN = "unknown"
    INFINITE = "infinite"


@dataclass(frozen=True)
class Length:
    """The number of items in each pass of a flow.

    ``count`` is the exact number, or an upper bound unless ``is_certain``; ``math.inf`` if the pass never
    ends or, unless that is certain, for an unknown number. Compares by value; picklable.
    """

    count: float
    is_certain: bool = True

    @property
    def kind(self) -> LengthKind:
        """What ``count`` is: exact, an upper bound, unknown or infinite."""
        if math.isinf(self.count):
            return LengthKind.INFINITE if self.is_certain else LengthKind.UNKNOWN
        return LengthKind.EXACT if self.is_certain else LengthKind.AT_MOST

    @property
    def is_exact(self) -> bool:
        """Whether ``count`` is the exact number of items."""
        return self.kind is LengthKind.EXACT

    @property
    def is_infinite(self) -> bool:
        """Whether a pass never ends."""
        return self.kind is LengthKind.INFINITE

    @property
    def items(self) -> int:
        """The exact number of items. Raises UsageError if it is not known."""
        if not self.is_exact:
            raise UsageError(f"the length of this flow is {self}, but an exact one is needed here")
        return int(self.count)

    def filtered(self) -> Length:
        """The length after a step that may leave out any item."""
        return Length(self.count, is_certain=False)

    def times(self, passes: int) -> Length:
        """The length of ``passes`` passes, one after the other."""
        return Length(self.count * passes, self.is_certain) if passes else Length(0)

    def without(self, count: int) -> Length:
        """The length without the first ``count`` items."""
        return Length(max(0, self.count - count), self.is_certain)

    def batches(self, size: int, *, drop: bool) -> Length:
        """The number of batches of ``size`` items; ``drop`` leaves out an incomplete batch."""
        if math.isinf(self.count):
            return self
        return Length(self.count // size if drop else -(-self.count // size), self.is_certain)

    def then(self, other: Length) -> Length:
        """The combined length of both flows."""
        if self.is_infinite or other.is_infinite:
            return INFINITE
        return Length(self.count + other.count, self.is_certain and other.is_certain)

    def shortest(self, other: Length) -> Length:
        """The length of the shorter of both flows."""
        return Length(min(self.count, other.count), self.is_certain and other.is_certain)

    def __str__(self) -> str:
        return self.kind.value if math.isinf(self.count) else f"{self.kind.value} {int(self.count):,}"


UNKNOWN = Length(math.inf, is_certain=False)
INFINITE = Length(math.inf)


class Node(ABC):
    """A source, or a step over other nodes.

    Nodes are frozen dataclasses: immutable, picklable, without the state of a pass. ``sources`` are the nodes
    that a node draws from; a source has none. ``title`` and ``facts`` are format strings for :attr:`label`
    and :attr:`description`, with the node as ``{0}``; the defaults are the class name and all plain fields.
    """

    title: ClassVar[str] = ""
    facts: ClassVar[str | None] = None

    @property
    def sources(self) -> tuple[Node, ...]:
        return ()

    @property
    @abstractmethod
    def length(self) -> Length:
        """The number of items of each pass."""

    def run(self, now: PassContext) -> Iterator[Any]:
        """Run one pass. Its items depend only on ``now.number``.

        Closing or dropping the iterator releases its resources. A step draws from its n-th source by
        ``self.sources[n].run(now.of(self, n))``.
        """
        return self.pick(now)

    @cached_property
    def label(self) -> str:
        """The name of this step or source in exceptions and stats: its method and distinguishing details."""
        return (self.title or type(self).__name__.lower()).format(self)

    @property
    def description(self) -> str:
        """A line of text with the options that items depend on, except functions and contents.

        It is the same whether the step runs in this thread, in other threads, or in processes.
        """
        plain = {f.name: getattr(self, f.name) for f in fields(cast("Any", self))}
        own = ", ".join(f"{name}={value!r}" for name, value in plain.items() if _is_plain(value))
        return f"{self.label.partition('(')[0]}({own if self.facts is None else self.facts.format(self)})"

    @property
    def can_pick(self) -> bool:
        """Whether :meth:`pick` can return any item by its number. Requires an exact length."""
        return False

    def pick(self, now: PassContext, numbers: Iterable[int] | None = None) -> Iterator[Any]:
        """Yield the items that ``run`` yields at these positions, in the order of ``numbers``; None for all.

        ``numbers`` may be drawn some items ahead. They are given only if the node ``can_pick``.
        """
        raise NotImplementedError

    @property
    def fetch(self) -> Fetch | None:
        """The maker of items from small :meth:`keys`, in any process; None if there is none."""
        return None

    def keys(self, now: PassContext, numbers: Iterable[int] | None) -> Iterator[Any]:
        """Yield the keys of the items that ``pick`` yields. They pickle to a few bytes."""
        raise NotImplementedError

    @property
    def never_change(self) -> bool:
        """Whether neither this nor an earlier step writes to an item after yielding it."""
        return False

    @property
    def height(self) -> int:
        """The length of the longest path to a source. Identifies the step in random streams."""
        return 1 + max((source.height for source in self.sources), default=-1)


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, int | float | str)


def walk(node: Node) -> Iterator[Node]:
    """Yield the node and all nodes it draws from, from last to first."""
    yield node
    for source in node.sources:
        yield from walk(source)


def has(node: Node, kind: type[Node] | UnionType) -> bool:
    """Whether the node, or any node it draws from, is of this kind."""
    return any(isinstance(each, kind) for each in walk(node))


class Step(Node):
    """A node with one source, in the field ``source``."""

    source: Node

    @property
    def sources(self) -> tuple[Node, ...]:
        return (self.source,)

    @property
    def length(self) -> Length:
        return self.source.length

    @property
    def never_change(self) -> bool:
        return self.source.never_change

    def drawn(self, now: PassContext) -> Iterator[Any]:
        """Run a pass of the source."""
        return self.source.run(now.of(self))


class InPlace(Step):
    """A step that can pick its items if its source can."""

    @property
    def can_pick(self) -> bool:
        return self.source.can_pick


Fetch = Callable[..., AbstractContextManager[Callable[[Any], Any]]]
"""Picklable function that opens a source in any process, as the context of a function from key to item."""


def fetch_by(item_of: Callable[[Any], Any]) -> Fetch:
    """Return what makes items by a function of their keys alone, without opening anything."""
    found: Any = partial(nullcontext, item_of)
    return cast("Fetch", found)


class Fetched(Node):
    """A source whose items are made from small keys (numbers, paths), also in the processes of a ``map``."""

    can_pick = never_change = True

    @property
    @abstractmethod
    def fetch(self) -> Fetch: ...

    def pick(self, now: PassContext, numbers: Iterable[int] | None = None) -> Iterator[Any]:
        with ending(self.keys(now, numbers)) as keys, self.fetch() as item_of:
            yield from map(now.here.timed(self.label, item_of), keys)


class Renumbered(InPlace):
    """A step that rearranges its source's items."""

    @abstractmethod
    def numbers(self, now: PassContext, places: Iterable[int]) -> Iterator[int]:
        """Yield the source's numbers of the items at these places. Called only if the source can pick."""

    def pick(self, now: PassContext, numbers: Iterable[int] | None = None) -> Iterator[Any]:
        return self.source.pick(now.of(self), self.numbers(now, within(numbers, self.length)))

    @property
    def fetch(self) -> Fetch | None:
        return self.source.fetch

    def keys(self, now: PassContext, numbers: Iterable[int] | None) -> Iterator[Any]:
        return self.source.keys(now.of(self), self.numbers(now, within(numbers, self.length)))


def within(numbers: Iterable[int] | None, length: Length) -> Iterator[int]:
    """Yield the numbers, or all for None. Raises IndexError if out of range, UsageError if not whole."""
    count = length.items
    if numbers is None:
        yield from range(count)
        return
    for number in numbers:
        if type(number) is not int and not is_whole(number):
            raise UsageError(f"items are picked by whole numbers, not by {number!r}")
        if not 0 <= number < count:
            raise IndexError(f"item {number} of {count}")
        yield number


def shared(numbers: Iterable[int], readers: int) -> list[Iterator[int]]:
    """Return the same numbers for several readers, each drawing them in any thread and at its own rate."""
    source, lock = iter(numbers), threading.Lock()
    waiting: list[deque[int]] = [deque() for _ in range(readers)]

    def drawn(own: deque[int]) -> Iterator[int]:
        while True:
            if not own:  # only then wait for another reader, which may wait long for its number
                with lock:
                    for number in islice(source, 0 if own else 1):
                        for each in waiting:
                            each.append(number)
                if not own:
                    return
            yield own.popleft()

    return [drawn(own) for own in waiting]


def numbered(
    step: Step, now: PassContext, numbers: Iterable[int] | None = None
) -> tuple[Iterator[Any], Iterator[int]]:
    """Return iterators over the source's items (all, or those with these numbers) and over their numbers.

    Draw the item first, then its number. The caller ends the items (:func:`.passes.end`).
    """
    if numbers is None:
        return step.drawn(now), count()
    own, places = shared(numbers, 2)
    return step.source.pick(now.of(step), own), places
