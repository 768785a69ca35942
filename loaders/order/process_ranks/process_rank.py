"""The rank of a process, and what says so."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import NamedTuple

from shardprep.formats.errors import UsageError

TRAINERS = ("chief", "master", "worker")  # the task types that train, in rank order; master is TF 1's chief


class ProcessRank(NamedTuple):
    """A rank and a world size, and the name of what says so."""

    rank: int
    world_size: int
    said_by: str

    def __str__(self) -> str:
        return f"{self.said_by} says rank {self.rank} of {self.world_size}"

    def is_same(self, other: ProcessRank) -> bool:
        """Whether both are the same rank of the same world."""
        return self[:2] == other[:2]

    def may_have_started(self, other: ProcessRank) -> bool:
        """Whether a process of this rank may have started others, of which the other is one."""
        return other.world_size > self.world_size and other.world_size % self.world_size == 0


def checked_rank(
    rank_name: str, rank: int | str | None, size_name: str, size: int | str | None
) -> ProcessRank:
    """Return the rank of two values and their names. Raises UsageError for a missing or invalid value."""
    for name, value, other in ((rank_name, rank, size_name), (size_name, size, rank_name)):
        if value is None:
            raise UsageError(f"{other} is set but {name} is not: set both or neither")
    number, count = _number(rank_name, rank), _number(size_name, size)
    if count < 1:
        raise UsageError(f"{size_name} must be at least 1, not {count}")
    if not 0 <= number < count:
        raise UsageError(f"{rank_name} must be from 0 to {count - 1} ({size_name} is {count}), not {number}")
    return ProcessRank(number, count, f"{rank_name} and {size_name}")


def _number(name: str, value: int | str | None) -> int:
    try:
        return int(value) if isinstance(value, str) else operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise UsageError(f"{name} must be a whole number, not {value!r}") from None


def rank_of_task(
    sizes: Mapping[str, int], kind: str | None, index: int | None, *, said_by: str
) -> ProcessRank | None:
    """Return the rank of a task of a TensorFlow cluster, the chief's first, then the workers'.

    ``sizes`` are the numbers of tasks by type. None for an evaluator, and where there is no cluster. Raises
    UsageError for a task that does not train, or that the cluster does not have.
    """
    if not sizes or kind == "evaluator":
        return None
    if kind not in TRAINERS:
        raise UsageError(f"{said_by} has the task type {kind!r}: only {', '.join(TRAINERS)} read data")
    trainers = [sizes.get(name, 0) for name in TRAINERS]
    place = TRAINERS.index(kind)
    if not isinstance(index, int) or not 0 <= index < trainers[place]:
        raise UsageError(f"{said_by} has the task {kind} {index!r} in a cluster of {trainers[place]}")
    return ProcessRank(sum(trainers[:place]) + index, sum(trainers), said_by)
