"""Steps that interleave flows at random."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from typing import Any

from shardprep.formats.errors import UsageError
from shardprep.loaders.flow.core.checks import seed_of
from shardprep.loaders.flow.core.length import UNKNOWN, Length
from shardprep.loaders.flow.core.pass_context import PassContext

from .combine import Combined, ended
from .weighted_choice import weighted_choice, weights_of, words


@dataclass(frozen=True)
class Mix(Combined):
    """All items of all flows, interleaved at random. See :meth:`.Flow.mix`.

    Without weights every interleaving has the same probability.
    """

    weights: tuple[float, ...] | None
    seed: int

    def __post_init__(self) -> None:
        seed_of(self.seed)
        if not all(weights_of(self.weights, len(self.nodes))):
            raise UsageError(
                f"a flow of weight 0 is never drawn; leave it out, or use choose(): {self.weights}"
            )
        if self.weights is None and not all(node.length.is_exact for node in self.nodes):
            lengths = ", ".join(str(node.length) for node in self.nodes)
            raise UsageError(f"mix() needs weights where lengths are not exact; these are: {lengths}")

    def run(self, now: PassContext) -> Iterator[Any]:
        left, cost = self._left(), self.weights is None
        word = words(now.bits(self, self.seed))
        passes = self.begun(now)
        with ended(passes):
            while any(left):
                n = weighted_choice(left, next(word))
                found = list(islice(passes[n], 1))
                left[n] = left[n] - cost if found else 0
                if found:
                    yield found.pop()

    def _left(self) -> list[int]:
        """The weights by which the next flow is drawn."""
        if self.weights is None:
            return [node.length.items for node in self.nodes]
        return weights_of(self.weights, len(self.nodes))


@dataclass(frozen=True)
class Choose(Combined):
    """Items of flows that are drawn at random, until a drawn flow has ended. See :meth:`.Flow.choose`."""

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

    def run(self, now: PassContext) -> Iterator[Any]:
        weights = self._weights
        passes = self.begun(now)
        with ended(passes):
            for word in words(now.bits(self, self.seed)):
                found = list(islice(passes[weighted_choice(weights, word)], 1))
                if not found:
                    return
                yield found.pop()
