"""Several flows as one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import chain
from typing import Any

from ...formats.errors import UsageError
from ..passes import end
from .combined import Combined, ended
from .length import Length
from .mix import Choose, Mix
from .running import Pass
from .shared_numbers import SharedNumbers
from .whole import within

__all__ = ["Choose", "Concat", "Mix", "Zip"]


@dataclass(frozen=True)
class Concat(Combined):
    """One flow's items after the other's."""

    def __post_init__(self) -> None:
        if any(node.length.is_infinite for node in self.nodes[:-1]):
            raise UsageError(
                "what comes after an infinite flow would never come; take(n) of it first, or mix()"
            )

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
        return _zipped(self.begun(now))

    def pick(self, now: Pass, numbers: Iterable[int]) -> Iterator[Any]:
        if not self.can_pick:
            return super().pick(now, numbers)
        shared = SharedNumbers(within(numbers, self.length), len(self.nodes))
        return _zipped([node.pick(now.of(self, n), shared.of(n)) for n, node in enumerate(self.nodes)])


def _zipped(passes: list[Iterator[Any]]) -> Iterator[Any]:
    """Python's own zip would hold on to the items."""
    with ended(passes):
        yield from iter(partial(_row, passes), None)


def _row(passes: Sequence[Iterator[Any]]) -> Any:
    """None where one has ended, after which no other is asked."""
    parts = tuple(map(next, passes))  # a StopIteration ends the tuple
    return joined(parts) if len(parts) == len(passes) else None


def joined(parts: Sequence[Any]) -> Any:
    """One tuple of the components of all, where tuples and lists have several; one dict of dicts."""
    if not all(isinstance(part, Mapping) for part in parts):
        spread = (part if isinstance(part, tuple | list) else (part,) for part in parts)
        return tuple(chain.from_iterable(spread))
    whole = {name: value for part in parts for name, value in part.items()}
    if len(whole) < sum(map(len, parts)):
        names = "; ".join(", ".join(map(str, part)) for part in parts)
        raise UsageError(f"the dicts to be joined have names in common ({names}); rename them with map()")
    return whole
