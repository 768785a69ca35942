"""What a consumer received over time, in bounded memory."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from time import perf_counter

MOST_BINS = 240
FIRST_WIDTH_S = 0.25  # of a bin; it doubles whenever there would be more bins


@dataclass(frozen=True)
class CoursePoint:
    """A part of the time: ``began`` seconds after the first batch, ``seconds`` long.

    In it came ``batches`` with ``rows``; ``ready`` is the mean number of batches that were ready beside each,
    and ``waited`` how many seconds the consumer waited for them.
    """

    began: float
    seconds: float
    batches: int
    rows: int
    ready: float
    waited: float


@dataclass
class _Bin:
    batches: int = 0
    rows: int = 0
    ready: int = 0
    waited: float = 0.0

    def plus(self, other: _Bin) -> _Bin:
        return _Bin(
            self.batches + other.batches,
            self.rows + other.rows,
            self.ready + other.ready,
            self.waited + other.waited,
        )


class Course:
    """The batches of a consumer in bins of equal width. One thread adds, any thread may read."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._state: tuple[float, list[_Bin]] = FIRST_WIDTH_S, []  # replaced together

    def add(self, rows: int, *, ready: int, waited: float) -> None:
        """Count a batch that came now."""
        now = perf_counter()
        if self._began is None:
            self._began = now
        width, bins = self._state
        place = int((now - self._began) / width)
        while place >= MOST_BINS:
            width, bins, place = width * 2, _in_pairs(bins), place // 2
            self._state = width, bins
        while len(bins) <= place:
            bins.append(_Bin())
        at = bins[place]
        at.batches += 1
        at.rows += rows
        at.ready += ready
        at.waited += waited

    def points(self) -> tuple[CoursePoint, ...]:
        """Return what was counted until now; the last point may be a part of its time."""
        width, bins = self._state
        return tuple(
            CoursePoint(
                place * width, width, each.batches, each.rows, each.ready / max(1, each.batches), each.waited
            )
            for place, each in enumerate(list(bins))
        )


def _in_pairs(bins: list[_Bin]) -> list[_Bin]:
    return [a.plus(b) for a, b in zip_longest(bins[::2], bins[1::2], fillvalue=_Bin())]
