"""What a flow consists of: sources and steps, each of which can run a pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

from ...formats.errors import UsageError
from ..passes import end
from .length import Length
from .running import Pass


class Node(ABC):
    """A source, or a step over others. A frozen dataclass: immutable, picklable, without any state of a pass.

    ``sources`` are the nodes that it draws from, none for a source.
    """

    @property
    @abstractmethod
    def sources(self) -> tuple[Node, ...]: ...

    @property
    @abstractmethod
    def length(self) -> Length:
        """How many items each pass has."""

    @abstractmethod
    def run(self, now: Pass) -> Iterator[Any]:
        """One pass. Deterministic in ``now.number``; closing the iterator, or dropping it, ends what it uses.

        A step draws from its n-th source by ``self.sources[n].run(now.of(self, n))``.
        """

    @property
    def can_pick(self) -> bool:
        """Whether any of the items can be had alone, in any order, by its number; needs an exact length."""
        return False

    def pick(self, now: Pass, numbers: Iterable[int]) -> Iterator[Any]:
        """The items of these numbers, as ``run`` would yield them at these places, in the order asked for.

        ``numbers`` may be drawn some items ahead of what is yielded. Raises UsageError where nothing can be picked.
        """
        raise UsageError(f"items of {type(self).__name__} cannot be had by number, in any order")

    @property
    def never_change(self) -> bool:
        """Whether what was yielded is never written to again by this or an earlier step."""
        return False

    @property
    def height(self) -> int:
        """The longest way down to a source, which has 0: names the step where randomness is drawn."""
        return 1 + max((source.height for source in self.sources), default=-1)


class Step(Node):
    """A node with one source, whose field is named ``source``."""

    source: Node

    @property
    def sources(self) -> tuple[Node, ...]:
        return (self.source,)

    @property
    def length(self) -> Length:
        return self.source.length

    def drawn(self, now: Pass) -> Iterator[Any]:
        """A pass of the source."""
        return self.source.run(now.of(self))


class Fetch(Protocol):
    """Picklable: what makes an item of a small key, in any process."""

    def open(self) -> AbstractContextManager[Any]:
        """Make ready; gives a function from a key to its item. One thread uses it."""


class Fetched(Node):
    """A source whose items are named by small keys (numbers, paths) and fetched where they are needed.

    So a ``map`` with processes sends the keys and has its workers read.
    """

    @property
    def sources(self) -> tuple[Node, ...]:
        return ()

    @abstractmethod
    def fetch(self) -> Fetch:
        """What fetches."""

    @abstractmethod
    def keys(self, now: Pass, numbers: Iterable[int]) -> Iterator[Any]:
        """The keys of the items of these numbers, in that order; picklable in few bytes."""

    @property
    def can_pick(self) -> bool:
        return True

    def pick(self, now: Pass, numbers: Iterable[int]) -> Iterator[Any]:
        keys = self.keys(now, numbers)
        try:
            with self.fetch().open() as item_of:
                yield from map(item_of, keys)
        finally:
            end(keys)

    def run(self, now: Pass) -> Iterator[Any]:
        return self.pick(now, range(self.length.items))
