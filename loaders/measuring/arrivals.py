"""Arrival times of measured items, and their rates."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

WINDOW_S = 0.5  # of one rate, so that the median ignores short delays

Arrival = tuple[float, int]
"""A time, and the amount that came then."""


class Arrivals:
    """Arrival times and amounts of ``items``, which are drawn and dropped at once.

    ``amount`` returns an item's amount. All figures are of the items after the first, from its arrival on. 16
    bytes are kept per item.
    """

    def __init__(self, items: Iterator[Any], amount: Callable[[Any], int]) -> None:
        self._items = items
        self._amount_of = amount
        self._times = array("d")
        self._amounts = array("q")

    def draw(self) -> None:
        """Draw one item. Raises StopIteration where there is none."""
        self._amounts.append(self._amount_of(next(self._items)))
        self._times.append(time.perf_counter())

    def draw_for(self, seconds: float) -> None:
        """Draw items until ``seconds`` after the first one's arrival; at least one."""
        until = self.first + seconds
        while len(self._times) < 2 or self._times[-1] <= until:
            self.draw()

    @property
    def first(self) -> float:
        """Time of the first arrival, by ``time.perf_counter``."""
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
        return float(np.median(window_rates(arrivals, min(WINDOW_S, self.seconds))))

    @property
    def gaps(self) -> tuple[float, float]:
        """Seconds between two arrivals: the median and the 99th percentile."""
        p50, p99 = np.percentile(np.diff(self._times), (50, 99)).tolist()
        return p50, p99


def window_rates(arrivals: Iterable[Arrival], width: float) -> list[float]:
    """Amount per second in windows of at least ``width`` seconds, each from one arrival to another.

    A shorter rest at the end is not counted.
    """
    later = iter(arrivals)
    rates, (since, _), amount = [], next(later), 0
    for at, count in later:
        amount += count
        if at - since >= width:
            rates.append(amount / (at - since))
            since, amount = at, 0
    return rates
