"""The rate of a task over its last minute, and what it lets expect."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

WINDOW_S = 60.0
LEAST_S = 0.05  # over less than this there is no rate yet


class Sample(NamedTuple):
    """How much of a task was done at a time, in seconds of the monotonic clock."""

    time: float
    records: int
    size: int


class Pace:
    """How far a task of so many records and bytes is, and how fast it goes on; without records, of bytes."""

    def __init__(self, records: int, size: int) -> None:
        self._records, self.counts_bytes = records, size > 0 and not records
        self.total, self._sized = size if self.counts_bytes else records, size > 0
        self._samples = deque([Sample(time.monotonic(), 0, 0)])

    def at(self, records: int, size: int) -> None:
        """Take the number of records and bytes that are done now."""
        now = time.monotonic()
        self._samples.append(Sample(now, min(records, self._records), size))
        while len(self._samples) > 2 and self._samples[1].time < now - WINDOW_S:
            self._samples.popleft()

    @property
    def records(self) -> int:
        """The number of records that are done, at most all."""
        return self._samples[-1].records

    @property
    def done(self) -> int:
        """The number of records, or of bytes, that are done, at most all."""
        return min(self._samples[-1].size, self.total) if self.counts_bytes else self.records

    @property
    def share(self) -> float:
        """The share that is done, 0 to 1."""
        return self.done / self.total if self.total else 1.0

    @property
    def images_per_second(self) -> float | None:
        """The rate, None if it is not known yet."""
        return self._rate("records")

    def rates(self) -> list[str]:
        """Return images/s, and MB/s if there are bytes, as far as they are known."""
        images, size = self.images_per_second, self._rate("size")
        found = [] if images is None or self.counts_bytes else [f"{images:,.0f} images/s"]
        return found if size is None or not self._sized else [*found, f"{size / 1e6:,.0f} MB/s"]

    def left(self) -> str:
        """Return the time that is left, "?" if it is not known yet.

        >>> Pace(0, 0).left()
        '0:00'
        """
        rate = self._rate("size" if self.counts_bytes else "records")
        missing = self.total - self.done
        if not missing:
            return clock(0)
        return clock(missing / rate) if rate else "?"

    def _rate(self, column: str) -> float | None:
        first, last = self._samples[0], self._samples[-1]
        seconds = last.time - first.time
        return (getattr(last, column) - getattr(first, column)) / seconds if seconds >= LEAST_S else None


def clock(seconds: float) -> str:
    """Return a time in minutes and seconds, or in hours.

    >>> clock(5), clock(754.4), clock(3661)
    ('0:05', '12:34', '1:01:01')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
