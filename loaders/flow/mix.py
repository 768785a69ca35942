"""Flows interleaved at random."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from typing import Any

from ...formats.errors import UsageError
from .combined import Combined, ended
from .length import UNKNOWN, Length
from .lots import drawn, weights_of, words
from .running import Pass
from .whole import seed_of


@dataclass(frozen=True)
class Mix(Combined):
    """All items of all flows, interleaved at random. See :meth:`.Flow.mix`.

    Without weights every way to interleave them has the same probability.
    """

    weights: tuple[float, ...] | None
    seed: int

    def __post_init__(self) -> None:
        seed_of(self.seed)
        if not all(weights_of(self.weights, len(self.nodes))):
            raise UsageError(
                f"a flow of weight 0 would never come; leave it out, or choose(): {self.weights}"
            )
        if self.weights is None and not all(node.length.is_exact for node in self.nodes):
            lengths = ", ".join(str(node.length) for node in self.nodes)
            raise UsageError(f"mix() needs weights where lengths are not exact; these are: {lengths}")

    def run(self, now: Pass) -> Iterator[Any]:
        left, cost = self._left(), self.weights is None
        word = words(now.bits(self, self.seed))
        passes = self.begun(now)
        with ended(passes):
            while any(left):
                n = drawn(left, next(word))
                found = list(islice(passes[n], 1))
                left[n] = left[n] - cost if found else 0
                if found:
                    yield found.pop()

    def _left(self) -> list[int]:
        """What the next flow is drawn by."""
        if self.weights is None:
            return [node.length.items for node in self.nodes]
        return weights_of(self.weights, len(self.nodes))


@dataclass(frozen=True)
class Choose(Combined):
    """An item of a flow drawn at random each time, until the drawn one has ended. See :meth:`.Flow.choose`."""

    weights: tuple[float, ...] | None
    seed: int

    def __post_init__(self) -> None:
        seed_of(self.seed)
        weights_of(self.weights, len(self.nodes))

    @property
    def length(self) -> Length:
        lengths = [node.length for node, weight in zip(self.nodes, self._weights, strict=True) if weight]
        if len(lengths) == 1 or all(length.is_infinite for length in lengths):
            return lengths[0]
        return (
            UNKNOWN
            if any(length.is_infinite for length in lengths)
            else reduce(Length.then, lengths).filtered()
        )

    @property
    def _weights(self) -> list[int]:
        return weights_of(self.weights, len(self.nodes))

    def run(self, now: Pass) -> Iterator[Any]:
        weights = self._weights
        passes = self.begun(now)
        with ended(passes):
            for word in words(now.bits(self, self.seed)):
                found = list(islice(passes[drawn(weights, word)], 1))
                if not found:
                    return
                yield found.pop()
