"""Counts of a queue's level, and of the waiting times on both sides of it."""

from __future__ import annotations

import threading
from time import perf_counter
from typing import Any

from shardprep.loaders.loader.bottleneck import Verdict
from shardprep.loaders.loader.stats import LoaderStats

from .stats import InputStats


def of_source(source: object) -> dict[str, Any]:
    """The fields ``source``, ``loader`` or ``upstream``, whichever the stats of this source fill."""
    stats = getattr(source, "stats", None)
    found = stats() if callable(stats) else None
    if isinstance(found, InputStats):
        return {"source": found}
    if isinstance(found, LoaderStats):
        return {"loader": found}
    verdict = getattr(found, "verdict", None)
    return {"upstream": verdict} if isinstance(verdict, Verdict) else {}


class Occupancy:
    """Counts for :class:`InputStats`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fed = self._taken = self._levels = self._found_full = self._found_empty = self._epochs = 0
        self._starved = self._blocked = self._waited = self._elapsed = 0.0
        self._fetching = self._converting = 0.0
        self._since: float | None = None  # when the timed part of the current epoch began
        self._unseen = False

    def drew(self, fetching: float, converting: float) -> None:
        """Count a batch: the seconds that the thread waited for it, and worked on it."""
        with self._lock:
            self._fetching += fetching
            self._converting += converting

    def fed(self, level: int, *, full: bool, seconds: float, unseen: bool) -> None:
        """Count a batch that was put at ``level``; it waited ``seconds`` if the queue was ``full``.
        Steps that are ``unseen`` cannot be measured; a level of 0 counts as a step that waited.
        """
        with self._lock:
            self._fed += 1
            self._levels += level
            self._found_full += full
            self._blocked += seconds if full else 0.0
            if unseen:
                self._unseen = True
                self._count_step(waited=0.0 if level == 0 else None)

    def taken(self, *, waited: float | None) -> None:
        """Count a step that got a batch; ``waited`` is its wait in seconds, None for no wait."""
        with self._lock:
            self._count_step(waited=waited)

    def _count_step(self, waited: float | None) -> None:
        timed = (waited or 0.0) if self._taken else 0.0  # the wait for the first batch of all is not typical
        self._taken += 1
        self._found_empty += waited is not None
        self._starved += waited or 0.0
        self._waited += timed
        if self._since is None:
            self._since = perf_counter() - timed

    def epoch(self) -> None:
        """Count an epoch that has ended."""
        with self._lock:
            self._epochs += 1
            self._elapsed, self._since = self._elapsed_now(), None

    def _elapsed_now(self) -> float:
        return self._elapsed if self._since is None else self._elapsed + perf_counter() - self._since

    def read(
        self,
        name: str,
        *,
        capacity: int,
        level: int,
        source: object = None,
    ) -> InputStats:
        """Return the stats of the input ``name``, which draws from ``source``."""
        inner = of_source(source)
        with self._lock:
            return InputStats(
                name=name,
                capacity=capacity,
                level=level,
                mean_level=self._levels / max(1, self._fed),
                fed=self._fed,
                batches=self._taken,
                timed=max(0, self._taken - 1),
                epochs=self._epochs,
                starved=self._found_empty / max(1, self._taken),
                blocked=self._found_full / max(1, self._fed),
                starved_seconds=self._starved,
                blocked_seconds=self._blocked,
                elapsed=self._elapsed_now(),
                waited=self._waited,
                fetching=self._fetching,
                converting=self._converting,
                unseen=self._unseen,
                **inner,
            )
