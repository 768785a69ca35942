"""Single steps of an epoch, in any order: what a batch of each consists of."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from .epoch import EpochPlan
from .order import Records


class LoadedStep(NamedTuple):
    """A step's batch, and its record numbers: those in it, and the bad ones that were skipped.

    ``left_out`` are those that the plan leaves out of its epoch, over all ranks; they are told with the last step.
    """

    step: int
    batch: tuple[Any, ...]
    delivered: Records
    skipped: Records
    left_out: Records


class EpochSteps:
    """The steps of an epoch from its beginning: 8 bytes for each record of the dataset."""

    def __init__(self, plan: EpochPlan, number: int) -> None:
        self.number = number
        self._order = plan.order(number)
        self._split = plan.split(0)

    def batches(self, steps: Iterable[int], drawn: deque[int]) -> Iterator[Records]:
        """The record numbers of each step, which is noted in ``drawn``. Raises IndexError for one it has not."""
        for step in steps:
            places = self._split.batch(step)
            drawn.append(step)
            yield self._order[places.start : places.stop]

    def loaded(self, step: int, batch: Sequence[Any], delivered: Records, skipped: Records) -> LoadedStep:
        """What came of a step."""
        start = self._split.stop if step == len(self._split) - 1 else len(self._order)
        return LoadedStep(step, tuple(batch), delivered, skipped, self._order[start:])
