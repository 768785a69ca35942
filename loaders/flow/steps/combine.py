"""Steps that combine several flows into one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from itertools import chain, islice
from typing import Any

from shardprep.formats.errors import UsageError
from shardprep.loaders.batching.passes import end
from shardprep.loaders.flow.core.checks import within
from shardprep.loaders.flow.core.length import Length
from shardprep.loaders.flow.core.node import Node
from shardprep.loaders.flow.core.pass_context import PassContext


class SharedNumbers:
    """The same numbers for several sources, which may draw them in any threads, each at its own rate.

    A number is drawn when the first source asks for it, and kept until the last source has drawn it.
    """

    def __init__(self, numbers: Iterable[int], sources: int) -> None:
        self._numbers = iter(numbers)
        self._lock = threading.Lock()
        self._waiting: list[deque[int]] = [deque() for _ in range(sources)]

    def of(self, source: int) -> Iterator[int]:
        """Yield the numbers for this source."""
        while True:
            with self._lock:
                number = self._next(source)
            if number is None:
                return
            yield number

    def _next(self, source: int) -> int | None:
        waiting = self._waiting[source]
        if not waiting:
            for number in islice(self._numbers, 1):
                for others in self._waiting:
                    others.append(number)
        return waiting.popleft() if waiting else None


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

    def begun(self, now: PassContext) -> list[Iterator[Any]]:
        """Begin a pass of each source."""
        return [node.run(now.of(self, n)) for n, node in enumerate(self.nodes)]


@contextmanager
def ended(passes: list[Iterator[Any]]) -> Iterator[None]:
    """A context that ends all passes."""
    with ExitStack() as opened:
        for items in passes:
            opened.callback(end, items)
        yield


@dataclass(frozen=True)
class Concat(Combined):
    """The items of one flow after the other."""

    def __post_init__(self) -> None:
        if any(node.length.is_infinite for node in self.nodes[:-1]):
            raise UsageError(
                "a flow after an infinite flow is never reached; use take(n) on the infinite one, or mix()"
            )

    def run(self, now: PassContext) -> Iterator[Any]:
        for n, node in enumerate(self.nodes):
            items = node.run(now.of(self, n))
            try:
                yield from items
            finally:
                end(items)


@dataclass(frozen=True)
class Zip(Combined):
    """One item of each flow as one item, until one of the flows ends. See :meth:`.Flow.zip`."""

    @property
    def length(self) -> Length:
        return reduce(Length.shortest, (node.length for node in self.nodes))

    @property
    def can_pick(self) -> bool:
        return all(node.can_pick for node in self.nodes)

    def run(self, now: PassContext) -> Iterator[Any]:
        return _zipped(self.begun(now))

    def pick(self, now: PassContext, numbers: Iterable[int]) -> Iterator[Any]:
        if not self.can_pick:
            return super().pick(now, numbers)
        shared = SharedNumbers(within(numbers, self.length), len(self.nodes))
        return _zipped([node.pick(now.of(self, n), shared.of(n)) for n, node in enumerate(self.nodes)])


def _zipped(passes: list[Iterator[Any]]) -> Iterator[Any]:
    """Yield the joined items. Python's ``zip`` would keep references to them."""
    with ended(passes):
        yield from iter(partial(_row, passes), None)


def _row(passes: Sequence[Iterator[Any]]) -> Any:
    """Return the next joined item; None if a pass has ended. The passes behind that are not drawn from."""
    parts = tuple(map(next, passes))  # a StopIteration ends the tuple
    return joined(parts) if len(parts) == len(passes) else None


def joined(parts: Sequence[Any]) -> Any:
    """Join items: dicts into one dict, others into one tuple, in which tuples and lists are flattened."""
    if not all(isinstance(part, Mapping) for part in parts):
        spread = (part if isinstance(part, tuple | list) else (part,) for part in parts)
        return tuple(chain.from_iterable(spread))
    whole = {name: value for part in parts for name, value in part.items()}
    if len(whole) < sum(map(len, parts)):
        names = "; ".join(", ".join(map(str, part)) for part in parts)
        raise UsageError(f"the dicts to join have names in common ({names}); rename them with map()")
    return whole
