"""A quick look at how well a shuffle mixes the classes, from some labels and some batches."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from .class_mixing import ENOUGH
from .epoch import EpochPlan, EpochSteps
from .shuffle_quality import Beside, expected_classes

PAIRS = 4096  # of records stored side by side, of which the labels are compared
LABELS = 1 << 16  # from which the number of classes in a fully shuffled batch is computed
PLACES, BATCHES = 3, 8  # in the epoch, and steps at each; each place takes the time of a window
MOST_WINDOW = 1 << 17  # records; computing the order of a larger window takes a tenth of a second
SIDE_BY_SIDE = 2.0  # times as often as by chance, above which equal neighbours are due to the stored order

Labels = npt.NDArray[np.integer[Any]]


def sampled_mixing(plan: EpochPlan, labels: Labels, window: int) -> Beside | None:
    """Return the mean number of classes in a batch, where it is too small; None where it is not.

    ``labels`` has the class of each record of the plan, in stored order. It takes under a millisecond where
    records of a class do not lie side by side; otherwise the batches of some steps are computed, unless the
    window is too large for that. No record is read.
    """
    if not 1 < plan.batch_size < len(labels) or window > MOST_WINDOW or not _lie_side_by_side(labels):
        return None
    found = _classes_in_batches(plan, labels)
    expected = expected_classes(labels[:: 1 + len(labels) // LABELS], plan.batch_size)
    return Beside(found, expected) if 0 < found < ENOUGH * expected else None


def _lie_side_by_side(labels: Labels) -> bool:
    """Whether neighbours are of one class much more often than two records of anywhere."""
    count = min(PAIRS, len(labels) - 1)
    places = np.arange(count) * (len(labels) - 1) // count
    beside, apart = labels[places], labels[(places + len(labels) // 2) % len(labels)]
    equal = np.count_nonzero(beside == labels[places + 1])
    _, sizes = np.unique(np.concatenate([beside, apart]), return_counts=True)
    chance = float((sizes / sizes.sum()) @ (sizes / sizes.sum())) * count
    return bool(equal > SIDE_BY_SIDE * chance + 5 * np.sqrt(chance) + 1)


def _classes_in_batches(plan: EpochPlan, labels: Labels) -> float:
    """The mean over full batches at some places of the first epoch; 0 where there are none."""
    steps = len(plan.split(0)) - (0 if plan.drop_last else 1)
    if steps < PLACES * BATCHES:
        chosen = list(range(steps))
    else:
        chosen = [
            steps * (2 * place + 1) // (2 * PLACES) + at for place in range(PLACES) for at in range(BATCHES)
        ]
        chosen = [min(step, steps - 1) for step in chosen]
    batches = EpochSteps(plan, 0).batches(chosen, deque())
    counts = [len(np.unique(labels[batch])) for batch in batches]
    return float(np.mean(counts)) if counts else 0.0
