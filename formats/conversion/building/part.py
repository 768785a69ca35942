"""A part of a conversion: the shards that one of several calls builds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shardprep.formats.errors import UsageError

from .plan import Plan, PlannedShard


@dataclass(frozen=True, slots=True)
class ConversionPart:
    """Part ``number`` of ``of``, counted from 1. Raises UsageError if there is no such part."""

    number: int
    of: int

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.of:
            raise UsageError(f"parts are counted from 1: of {self.of} there is no part {self.number}")

    def __str__(self) -> str:
        return f"part {self.number} of {self.of}"

    def shares(self, plans: Iterable[Plan]) -> Iterator[tuple[PlannedShard, ...]]:
        """Yield this part's shards of each plan.

        Shards are dealt out one by one, over all plans, so that two parts differ by one shard at most.
        """
        before = 0
        for plan in plans:
            yield tuple(s for s in plan.shards if (before + s.number) % self.of == self.number - 1)
            before += len(plan.shards)
