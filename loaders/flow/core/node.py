"""The nodes of a flow: sources and steps, each of which can run a pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any, Protocol, cast

from shardprep.formats.errors import UsageError
from shardprep.loaders.batching.passes import end

from .length import Length
from .pass_context import PassContext


class Node(ABC):
    """A source, or a step over other nodes.

    Nodes are frozen dataclasses: immutable, picklable, without any state of a pass. ``sources`` are the nodes
    that a node draws from; a source has none.
    """

    @property
    @abstractmethod
    def sources(self) -> tuple[Node, ...]: ...

    @property
    @abstractmethod
    def length(self) -> Length:
        """The number of items of each pass."""

    @abstractmethod
    def run(self, now: PassContext) -> Iterator[Any]:
        """Run one pass. Its items depend on ``now.number`` only.

        Closing or dropping the iterator releases what the pass uses. A step draws from its n-th source by
        ``self.sources[n].run(now.of(self, n))``.
        """

    @property
    def label(self) -> str:
        """The name of this step or source in exceptions and stats: its method, with what tells it apart."""
        return type(self).__name__.lower()

    @property
    def description(self) -> str:
        """What the items of a number depend on, besides functions and contents, as a line of text.

        It is the same however the step is run: in this thread, in others, or in processes.
        """
        plain = {f.name: getattr(self, f.name) for f in fields(cast("Any", self))}
        facts = [f"{name}={value!r}" for name, value in plain.items() if _is_plain(value)]
        return described(self, *facts)

    @property
    def can_pick(self) -> bool:
        """Whether :meth:`pick` can return any item by its number. Requires an exact length."""
        return False

    def pick(self, now: PassContext, numbers: Iterable[int]) -> Iterator[Any]:
        """Yield the items that ``run`` yields at these places, in the order of ``numbers``.

        ``numbers`` may be drawn some items ahead of the yielded item. Raises UsageError unless ``can_pick``.
        """
        raise UsageError(f"items of {type(self).__name__} cannot be had by number, in any order")

    @property
    def never_change(self) -> bool:
        """Whether neither this nor an earlier step writes to an item after it was yielded."""
        return False

    @property
    def height(self) -> int:
        """The longest path to a source, which has height 0. It identifies the step in random streams."""
        return 1 + max((source.height for source in self.sources), default=-1)


def described(node: Node, *facts: str) -> str:
    """Return the description of a node, with these facts."""
    return f"{node.label.partition('(')[0]}({', '.join(facts)})"


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, int | float | str)


class Step(Node):
    """A node with one source, in the field ``source``."""

    source: Node

    @property
    def sources(self) -> tuple[Node, ...]:
        return (self.source,)

    @property
    def length(self) -> Length:
        return self.source.length

    def drawn(self, now: PassContext) -> Iterator[Any]:
        """Run a pass of the source."""
        return self.source.run(now.of(self))


class Fetch(Protocol):
    """Makes an item from a small key, in any process. Picklable."""

    def open(self) -> AbstractContextManager[Any]:
        """Open what is needed; the context's value is a function from a key to its item, for one thread."""


class Fetched(Node):
    """A source with items that are made from small keys (numbers, paths), in any process.

    A ``map`` with processes sends the keys to its workers, and the workers read.
    """

    @property
    def sources(self) -> tuple[Node, ...]:
        return ()

    @abstractmethod
    def fetch(self) -> Fetch:
        """The object that makes items from keys."""

    @abstractmethod
    def keys(self, now: PassContext, numbers: Iterable[int]) -> Iterator[Any]:
        """The keys of the items with these numbers, in that order. Each key pickles to few bytes."""

    @property
    def can_pick(self) -> bool:
        return True

    def pick(self, now: PassContext, numbers: Iterable[int]) -> Iterator[Any]:
        keys = self.keys(now, numbers)
        try:
            with self.fetch().open() as item_of:
                yield from map(now.here.timed(self.label, item_of), keys)
        finally:
            end(keys)

    def run(self, now: PassContext) -> Iterator[Any]:
        return self.pick(now, range(self.length.items))


class BatchingSource(ABC):
    """A node that can make whole batches for a following ``batch`` step, if ``can_batch``."""

    @property
    @abstractmethod
    def can_batch(self) -> bool: ...

    @abstractmethod
    def batches(self, now: PassContext, size: int, *, least: int) -> Iterator[Any]:
        """Yield new arrays of ``size`` rows in the form of the items; they are never written to again.

        A last batch may have fewer rows, but at least ``least``; fewer items than that are left out.
        """
