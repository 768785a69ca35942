"""Where two runs part: the first step and record that differ, and why. Pure: no image is read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from shardprep.loaders.order.displaced_order import Records
from shardprep.loaders.order.epoch import EpochPlan, EpochSteps

from .run_card import RunCard
from .settings import DECIDING, Differences, deciding

Kind = Literal["dataset", "order", "labels", "columns", "augmentation", "pixels"]
Compared = Callable[[int, int], int | None]

KINDS: tuple[Kind, ...] = ("order", "labels", "columns", "augmentation")
AT_ONCE: tuple[Kind, ...] = ("columns", "augmentation")
NONE = np.empty(0, np.int64)


class RunOrder(NamedTuple):
    """What a run delivers of a dataset: its ``card`` and ``plan``, and the records of the plan's places.

    ``numbers_at`` maps places of an epoch to record numbers; ``labels`` are the run's, by record number.
    """

    card: RunCard
    plan: EpochPlan
    numbers_at: Callable[[Records, int], Records]
    labels: npt.NDArray[np.int64]

    def steps(self, epoch: int) -> Iterator[Records]:
        """Yield the record numbers of each step of this rank."""
        steps = EpochSteps(self.plan, epoch)
        places = steps.batches(range(len(steps)), deque(maxlen=0))
        return (self.numbers_at(each, epoch) for each in places)


@dataclass(frozen=True)
class Parting:
    """The first ``row`` of a ``step`` of an ``epoch`` at which two runs differ.

    ``kind`` is what differs there: the dataset, the order of records, their labels, the columns of a batch,
    the augmentation, or the pixels. ``numbers`` are the two record numbers, None where a run has no such row,
    or where the datasets differ. ``because`` has the settings that decide it: name to both values.
    """

    epoch: int
    step: int
    row: int
    kind: Kind
    numbers: tuple[int | None, int | None]
    because: Differences

    def to_json(self) -> dict[str, Any]:
        """Return a value of JSON types."""
        return asdict(self) | {"numbers": list(self.numbers), "because": _listed(self.because)}


def _listed(found: Mapping[str, tuple[str, str]]) -> dict[str, list[str]]:
    return {name: list(both) for name, both in found.items()}


def parting_of_datasets(one: RunCard, other: RunCard) -> Parting | None:
    """Return where runs of two datasets part, which is at once; None for runs of one dataset."""
    if one.dataset == other.dataset:
        return None
    return Parting(0, 0, 0, "dataset", (None, None), {"dataset": (one.dataset, other.dataset)})


def first_parting(
    one: RunOrder,
    other: RunOrder,
    epochs: Iterable[int],
    *,
    pixels: Compared | None = None,
    step_done: Callable[[], object] = lambda: None,
) -> Parting | None:
    """Return where two runs of one dataset part in these epochs, and None where they do not.

    Settings that decide the augmentation of every record count from the first one. With ``pixels`` they do
    not: it is asked for the first row of a step that differs, while records and labels are the same.
    ``step_done`` is called after each step.
    """
    if parted := parting_of_datasets(one.card, other.card):
        return parted
    found = {kind: deciding(kind, one.card, other.card) for kind in DECIDING}
    kinds = [kind for kind in KINDS if found[kind] and not (pixels and kind == "augmentation")]
    if not kinds and not pixels:
        return None
    for epoch in epochs:
        for step, both in enumerate(zip_longest(one.steps(epoch), other.steps(epoch), fillvalue=NONE)):
            rows = dict(_in_step(one, other, *both)) | {kind: 0 for kind in AT_ONCE if kind in kinds}
            if not rows and pixels and (row := pixels(epoch, step)) is not None:
                rows = {"pixels": row}
            if rows:
                kind = min(rows, key=lambda kind: rows[kind])  # the record before what is made of it
                return Parting(epoch, step, rows[kind], kind, _at(rows[kind], both), found[kind])
            step_done()
    return None


def _in_step(one: RunOrder, other: RunOrder, some: Records, others: Records) -> Iterator[tuple[Kind, int]]:
    """Yield what differs, and the first row where it does: another record or none, another label."""
    common = min(len(some), len(others))
    records = some[:common] != others[:common]
    if records.any() or len(some) != len(others):
        yield "order", int(records.argmax()) if records.any() else common
    labels = one.labels[some[:common]] != other.labels[others[:common]]
    if (labels & ~records).any():
        yield "labels", int((labels & ~records).argmax())


def _at(row: int, both: tuple[Records, Records]) -> tuple[int | None, int | None]:
    one, other = (int(numbers[row]) if row < len(numbers) else None for numbers in both)
    return one, other
