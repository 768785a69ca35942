"""The order of tensorpack's LocallyShuffleData, to compare shuffles with."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Order = npt.NDArray[np.int64]


def buffer_shuffled(items: int, size: int, rng: np.random.Generator) -> Order:
    """The first ``items`` numbers that leave a queue of ``size``, into which 0, 1, 2, … go.

    The whole queue is shuffled after each ``size // 3`` numbers that went in. Once it is full, one number
    leaves at its head for each that goes in at its end.
    """
    queue, out = np.arange(size), np.empty(items, np.int64)
    interval = size // 3
    done, entered = 0, size
    rng.shuffle(queue)
    while done < items:
        count = min(interval, items - done)
        out[done : done + count] = queue[:count]
        queue = np.concatenate([queue[count:], np.arange(entered, entered + count)])
        done, entered = done + count, entered + count
        rng.shuffle(queue)
    return out


def spread(order: Order, *, edge: int) -> float:
    """The standard deviation of how far numbers move, ``edge`` places away from both ends."""
    return float(np.std((order - np.arange(len(order)))[edge:-edge]))
