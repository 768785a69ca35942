"""Several flows as one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from itertools import islice
from typing import Any

from ...formats.errors import UsageError
from ..passes import end
from .length import INFINITE, UNKNOWN, Length, at_most
from .lots import drawn, weights_of, words
from .node import Node
from .running import Pass
from .shared_numbers import SharedNumbers
from .whole import seed_of, within


@dataclass(frozen=True)
class Combined(Node):
    """A step over several flows."""

    nodes: tuple[Node, ...]

    @property
    def sources(self) -> tuple[Node, ...]:
        return self.nodes

    @property
    def length(self) -> Length:
        return reduce(Length.then, (node.length for node in self.nodes))

    @property
    def never_change(self) -> bool:
        return all(node.never_change for node in self.nodes)

    @contextmanager
    def begun(self, now: Pass) -> Iterator[list[Iterator[Any]]]:
        """A pass of each, all of which end with the context."""
        with ExitStack() as opened:
            passes = [node.run(now.of(self, n)) for n, node in enumerate(self.nodes)]
            for items in passes:
                opened.callback(end, items)
            yield passes


@dataclass(frozen=True)
class Concat(Combined):
    """One flow's items after the other's."""

    def __post_init__(self) -> None:
        if any(node.length.is_infinite for node in self.nodes[:-1]):
            raise UsageError("what comes after an infinite flow would never come; take(n) of it first, or mix()")

    def run(self, now: Pass) -> Iterator[Any]:
        for n, node in enumerate(self.nodes):
            items = node.run(now.of(self, n))
            try:
                yield from items
            finally:
                end(items)


@dataclass(frozen=True)
class Zip(Combined):
    """One item of each flow as one, until one of them ends. See :meth:`.Flow.zip`."""

    @property
    def length(self) -> Length:
        return reduce(Length.shortest, (node.length for node in self.nodes))

    @property
    def can_pick(self) -> bool:
        return all(node.can_pick for node in self.nodes)

    def run(self, now: Pass) -> Iterator[Any]:
        with self.begun(now) as passes:
            yield from _zipped(passes)

    def pick(self, now: Pass, numbers: Iterable[int]) -> Iterator[Any]:
        if not self.can_pick:
            return super().pick(now, numbers)
        return self._picked(now, SharedNumbers(within(numbers, self.length), len(self.nodes)))

    def _picked(self, now: Pass, numbers: SharedNumbers) -> Iterator[Any]:
        with ExitStack() as opened:
            passes = [node.pick(now.of(self, n), numbers.of(n)) for n, node in enumerate(self.nodes)]
            for items in passes:
                opened.callback(end, items)
            yield from _zipped(passes)


def _zipped(passes: Sequence[Iterator[Any]]) -> Iterator[Any]:
    """Python's own zip would hold on to the items."""
    return iter(partial(_row, passes), None)


def _row(passes: Sequence[Iterator[Any]]) -> Any:
    """None where one has ended."""
    parts = [part for items in passes for part in islice(items, 1)]
    return joined(parts) if len(parts) == len(passes) else None


def joined(parts: Sequence[Any]) -> Any:
    """One tuple of the components of all, where tuples and lists have several; one dict of dicts."""
    if not all(isinstance(part, Mapping) for part in parts):
        spread = (part if isinstance(part, tuple | list) else (part,) for part in parts)
        return tuple(component for components in spread for component in components)
    whole = {name: value for part in parts for name, value in part.items()}
    if len(whole) < sum(map(len, parts)):
        raise UsageError(f"dicts to be joined have names in common: {[sorted(map(str, part)) for part in parts]}")
    return whole


@dataclass(frozen=True)
class Mix(Combined):
    """All items of all flows, interleaved at random. See :meth:`.Flow.mix`."""

    weights: tuple[float, ...] | None
    seed: int

    def __post_init__(self) -> None:
        seed_of(self.seed)
        if not all(weights_of(self.weights, len(self.nodes))):
            raise UsageError(f"a flow of weight 0 would never come; leave it out, or choose(): {self.weights}")
        if self.weights is None and not all(node.length.is_exact for node in self.nodes):
            lengths = ", ".join(str(node.length) for node in self.nodes)
            raise UsageError(f"mix() needs weights where lengths are not exact; they are {lengths}")

    def run(self, now: Pass) -> Iterator[Any]:
        spent = 1 if self.weights is None else 0
        left = self._weights()
        with self.begun(now) as passes:
            for word in words(now.bits(self, self.seed)):
                if not any(left):
                    return
                ...
