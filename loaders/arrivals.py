"""When what is measured came, and the rates that follow."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

WINDOW = 0.5  # seconds over which a rate is taken, so that the median passes over hiccups

Arrival = tuple[float, int]
"""When something came, and how much."""


class Arrivals:
    """Draws from ``things`` and drops each at once, as does a consumer who has used it; ``amount`` says how much it was.

    All figures are of what came after the first, from its arrival on. 16 bytes are kept of each.
    """

    def __init__(self, things: Iterator[Any], amount: Callable[[Any], int]) -> None:
        self._things = things
        self._amount_of = amount
        self._times = array("d")
        self._amounts = array("q")

    def draw(self) -> None:
        """One more. Raises StopIteration where there is none."""
        self._amounts.append(self._amount_of(next(self._things)))
        self._times.append(time.perf_counter())

    def draw_for(self, seconds: float) -> None:
        """More, until so many seconds after the first came; at least one."""
        until = self.first + seconds
        while len(self._times) < 2 or self._times[-1] <= until:
            self.draw()

    @property
    def first(self) -> float:
        """When, on the clock of ``time.perf_counter``."""
        return self._times[0]

    @property
    def seconds(self) -> float:
        return self._times[-1] - self._times[0]

    @property
    def count(self) -> int:
        return len(self._times) - 1

    @property
    def amount(self) -> int:
        return sum(self._amounts) - self._amounts[0]

    @property
    def rate(self) -> float:
        """Amount per second: the median over windows."""
        arrivals = zip(self._times, self._amounts, strict=True)
        return float(np.median(window_rates(arrivals, min(WINDOW, self.seconds))))

    @property
    def gaps(self) -> tuple[float, float]:
        """Seconds between two: the median, and what all but one in a hundred are below."""
        p50, p99 = np.percentile(np.diff(self._times), (50, 99)).tolist()
        return p50, p99


def window_rates(arrivals: Iterable[Arrival], width: float) -> list[float]:
    """Amount per second in windows of at least ``width`` seconds, each from one arrival to another.

    What is left at the end belongs to no window.
    """
    later = iter(arrivals)
    rates, (since, _), amount = [], next(later), 0
    for at, count in later:
        amount += count
        if at - since >= width:
            rates.append(amount / (at - since))
            since, amount = at, 0
    return rates
