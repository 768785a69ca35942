"""Steps that combine flows: one after the other, side by side, or mixed at random."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import accumulate, chain, islice
from typing import Any, Self

import numpy as np

from shardprep.formats.errors import UsageError
from shardprep.formats.runtime.progress import seed_of
from shardprep.loaders.batches.passes import ending, ending_all
from shardprep.loaders.flow.node import UNKNOWN, Length, Node, shared, within
from shardprep.loaders.flow.passes import PassContext

BLOCK = 1024


def words(bits: np.random.Philox) -> Iterator[int]:
    while True:
        yield from bits.random_raw(BLOCK).tolist()


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
        return [node.run(now.of(self, n)) for n, node in enumerate(self.nodes)]


@dataclass(frozen=True)
class Concat(Combined):
    """The items of all flows, one flow after the other."""

    def __post_init__(self) -> None:
        if any(node.length.is_infinite for node in self.nodes[:-1]):
            raise UsageError(
                "a flow after an infinite flow is never reached; use take(n) on the infinite one, or mix()"
            )

    def run(self, now: PassContext) -> Iterator[Any]:
        for n, node in enumerate(self.nodes):
            with ending(node.run(now.of(self, n))) as items:
                yield from items


@dataclass(frozen=True)
class Zip(Combined):
    """Items joined from one item of each flow, until one of the flows ends. See :meth:`.Flow.zip`."""

    @property
    def length(self) -> Length:
        return reduce(Length.shortest, (node.length for node in self.nodes))

    @property
    def can_pick(self) -> bool:
        return all(node.can_pick for node in self.nodes)

    def pick(self, now: PassContext, numbers: Iterable[int] | None = None) -> Iterator[Any]:
        if numbers is None:
            return _zipped(self.begun(now))
        places = shared(within(numbers, self.length), len(self.nodes))
        return _zipped([node.pick(now.of(self, n), places[n]) for n, node in enumerate(self.nodes)])


def _zipped(passes: list[Iterator[Any]]) -> Iterator[Any]:
    """Yield the joined items. ``zip`` would keep references to them."""
    with ending_all(passes):
        yield from iter(partial(_row, passes), None)


def _row(passes: Sequence[Iterator[Any]]) -> Any:
    """Return the next joined item, None once a pass has ended; later passes are not drawn from."""
    parts = tuple(map(next, passes))  # a StopIteration ends the tuple
    return joined(parts) if len(parts) == len(passes) else None


def joined(parts: Sequence[Any]) -> Any:
    """Join items: dicts into one dict, others into one tuple; tuples and lists are flattened into it."""
    if not all(isinstance(part, Mapping) for part in parts):
        spread = (part if isinstance(part, tuple | list) else (part,) for part in parts)
        return tuple(chain.from_iterable(spread))
    whole = {name: value for part in parts for name, value in part.items()}
    if len(whole) < sum(map(len, parts)):
        names = "; ".join(", ".join(map(str, part)) for part in parts)
        raise UsageError(f"the dicts to join have names in common ({names}); rename them with map()")
    return whole


@dataclass(frozen=True)
class RandomlyCombined(Combined):
    """A step that chooses the flow of each item at random."""

    weights: tuple[float, ...] | None
    seed: int

    @classmethod
    def of(cls, nodes: tuple[Node, ...], weights: Sequence[float] | None, seed: int) -> Self:
        """Return the step. Raises UsageError for weights or a seed that cannot be meant."""
        try:
            given = None if weights is None else tuple(map(float, weights))
        except (TypeError, ValueError):
            given = ()
        if given is not None and (
            len(given) != len(nodes) or not any(given) or not all(0 <= each < math.inf for each in given)
        ):
            raise UsageError(
                f"weights are finite numbers, not negative and not all 0, one for each of {len(nodes)} flows, "
                f"this flow's first; not {weights!r}"
            )
        return cls(nodes, given, seed_of(seed))

    @property
    def proportions(self) -> list[int]:
        """The weights as integers; equal without weights."""
        ratios = [weight.as_integer_ratio() for weight in self.weights or [1] * len(self.nodes)]
        common = math.lcm(*(below for _, below in ratios))
        return [above * (common // below) for above, below in ratios]


def weighted_choice(weights: Sequence[int], word: int) -> int:
    """Return the index that a random word selects, by probability ``weights[n] / sum(weights)`` to 2**-64."""
    ends = list(accumulate(weights))
    return bisect_right(ends, word * ends[-1] >> 64)


@dataclass(frozen=True)
class Mix(RandomlyCombined):
    """All items of all flows, interleaved at random; without weights all interleavings are equally likely."""

    def __post_init__(self) -> None:
        if not all(self.proportions):
            raise UsageError(
                f"a flow of weight 0 is never drawn; leave it out, or use choose(): {self.weights}"
            )
        if self.weights is None and not all(node.length.is_exact for node in self.nodes):
            lengths = ", ".join(str(node.length) for node in self.nodes)
            raise UsageError(f"mix() needs weights where lengths are not exact; the lengths are {lengths}")

    def run(self, now: PassContext) -> Iterator[Any]:
        cost = self.weights is None  # then a flow's weight is its number of remaining items
        left = [node.length.items for node in self.nodes] if cost else self.proportions
        word = words(now.bits(self, self.seed))
        with ending_all(self.begun(now)) as passes:
            while any(left):
                n = weighted_choice(left, next(word))
                found = list(islice(passes[n], 1))
                left[n] = left[n] - cost if found else 0
                if found:
                    yield found.pop()


@dataclass(frozen=True)
class Choose(RandomlyCombined):
    """Items from randomly chosen flows, until a chosen flow has ended. See :meth:`.Flow.choose`."""

    @property
    def length(self) -> Length:
        drawn = [node.length for node, weight in zip(self.nodes, self.proportions, strict=True) if weight]
        if len(drawn) == 1 or all(length.is_infinite for length in drawn):
            return drawn[0]
        all_items = reduce(Length.then, drawn)
        return UNKNOWN if all_items.is_infinite else all_items.filtered()

    def run(self, now: PassContext) -> Iterator[Any]:
        weights = self.proportions
        with ending_all(self.begun(now)) as passes:
            for word in words(now.bits(self, self.seed)):
                found = list(islice(passes[weighted_choice(weights, word)], 1))
                if not found:
                    return
                yield found.pop()
