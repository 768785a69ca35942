"""The numbers of rows that are chosen as in an array."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]


def row_numbers(wanted: Any, count: int) -> Numbers:
    """Return the numbers of the rows that a mask, an array or list of numbers, or one number chooses.

    Negative numbers count from the end of the ``count`` rows. Raises IndexError for a number out of range,
    and for a mask of another length; TypeError for anything else.

    >>> row_numbers(np.array([True, False, True]), 3), row_numbers(-1, 3)
    (array([0, 2]), array([2]))
    """
    if not isinstance(wanted, (np.ndarray, list)):
        return _in_range(np.array([operator.index(wanted)]), count)
    chosen = np.asarray(wanted)
    if chosen.dtype == bool:
        if chosen.shape != (count,):
            raise IndexError(f"a mask of shape {chosen.shape} for {count} records")
        return np.flatnonzero(chosen)
    if chosen.size and not np.issubdtype(chosen.dtype, np.integer):
        raise TypeError(f"records are chosen by whole numbers, not by {chosen.dtype}")
    return _in_range(chosen.astype(np.int64), count)


def _in_range(numbers: Numbers, count: int) -> Numbers:
    wrong = numbers[(numbers < -count) | (numbers >= count)]
    if wrong.size:
        raise IndexError(f"record {wrong[0]} of {count}")
    return np.where(numbers < 0, numbers + count, numbers)
