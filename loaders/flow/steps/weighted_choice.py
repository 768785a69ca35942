"""Random choices with exact probabilities, made from integers and raw random words only."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np

from shardprep.formats.errors import UsageError

BLOCK = 1024


def words(bits: np.random.Philox) -> Iterator[int]:
    """Yield the stream's 64-bit words."""
    while True:
        yield from bits.random_raw(BLOCK).tolist()


def as_weights(weights: Sequence[float] | None) -> tuple[float, ...] | None:
    """Return a user's weights as floats. Raises UsageError for values that are no numbers."""
    try:
        return None if weights is None else tuple(map(float, weights))
    except (TypeError, ValueError) as error:
        raise UsageError(f"weights are numbers, one for each flow, not {weights!r}") from error


def weights_of(weights: Sequence[float] | None, flows: int) -> list[int]:
    """Return the weights as integers in the same proportions; None means equal weights. Raises UsageError."""
    if weights is None:
        return [1] * flows
    if len(weights) != flows:
        raise UsageError(f"{len(weights)} weights for {flows} flows: give one for each, this flow's first")
    if not all(0 <= weight < math.inf for weight in weights) or not any(weights):
        raise UsageError(f"weights must be finite, not negative, and not all 0, not {tuple(weights)}")
    ratios = [weight.as_integer_ratio() for weight in weights]
    common = math.lcm(*(below for _, below in ratios))
    return [above * (common // below) for above, below in ratios]


def weighted_choice(weights: Sequence[int], word: int) -> int:
    """Return the n that the random word selects, with probability ``weights[n] / sum(weights)`` to 2**-64."""
    ends = list(accumulate(weights))
    return bisect_right(ends, word * ends[-1] >> 64)
