"""Counts and times of an engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from time import perf_counter
from typing import Any, Self

from shardprep.loaders.engine.protocol.status_table import StatusTable

from .dispatcher import Dispatcher


@dataclass(frozen=True)
class EngineStats:
    """Counts and seconds since the engine was made, or since other stats of it (:meth:`since`).

    ``rows`` and ``batches`` were delivered. ``timed`` of the rows were not in the first batch of all;
    ``copied`` of the batches were copied because too many were held. ``warming`` is the seconds before that
    first batch, while the workers start; ``elapsed`` the seconds of all runs after it. ``starved`` is how
    long the consumer waited for later batches, ``handing`` how long its thread took to hand batches over,
    ``blocked`` how long the workers had no free slot. ``filling`` and ``waiting`` are each worker's seconds
    with and without a lease; ``cpu`` and ``queued`` are the parts of ``filling`` on a CPU and waiting for
    one. ``stages`` has the seconds of each stage that the work times, of all workers together. ``restarts``
    is how many workers were replaced.
    """

    rows: int
    timed: int
    batches: int
    elapsed: float
    warming: float
    starved: float
    handing: float
    blocked: float
    filling: tuple[float, ...]
    waiting: tuple[float, ...]
    cpu: tuple[float, ...]
    queued: tuple[float, ...]
    stages: dict[str, float]
    copied: int
    restarts: int

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.rows:,} rows in {self.batches:,} batches>"

    def since(self, before: Self) -> Self:
        """Return what was counted after ``before``, earlier stats of the same engine."""
        names = [f.name for f in fields(EngineStats)]
        return replace(self, **{name: _less(getattr(self, name), getattr(before, name)) for name in names})


def _less(after: Any, before: Any) -> Any:
    if isinstance(after, dict):
        return {name: value - before[name] for name, value in after.items()}
    if isinstance(after, tuple):
        return tuple(b - a for a, b in zip(before, after, strict=True))
    return after - before


@dataclass
class Meter:
    """Counters of the consumer's side; one thread at a time uses them."""

    rows: int = 0
    timed: int = 0
    batches: int = 0
    warming: float = 0.0
    starved: float = 0.0
    handing: float = 0.0
    _elapsed: float = 0.0
    _since: float | None = None  # when the timed part of the current run began
    _is_first: bool = False

    def waited(self, seconds: float) -> None:
        """Count the seconds that the consumer waited for the batch that it now has."""
        self._is_first = not self.batches
        if self._is_first:
            self.warming += seconds
        else:
            self.starved += seconds
        if self._since is None:
            self._since = perf_counter() - (0.0 if self._is_first else seconds)

    def handed(self, rows: int, seconds: float) -> None:
        """Count a batch that was handed over, and the seconds which that took."""
        self.batches += 1
        self.rows += rows
        self.timed += 0 if self._is_first else rows
        self.handing += seconds

    @property
    def waiting(self) -> float:
        """Seconds that the consumer has waited for batches, those before first ones included."""
        return self.warming + self.starved

    @contextmanager
    def run(self) -> Iterator[None]:
        """Measure the elapsed time of a run within the context."""
        try:
            yield
        finally:
            self._elapsed, self._since = self.elapsed, None

    @property
    def elapsed(self) -> float:
        since = self._since
        return self._elapsed if since is None else self._elapsed + perf_counter() - since

    def read(
        self,
        status_table: StatusTable,
        stages: tuple[str, ...],
        *,
        dispatcher: Dispatcher | None,
        copied: int,
    ) -> EngineStats:
        return EngineStats(
            rows=self.rows,
            timed=self.timed,
            batches=self.batches,
            elapsed=self.elapsed,
            warming=self.warming,
            starved=self.starved,
            handing=self.handing,
            blocked=dispatcher.blocked if dispatcher else 0.0,
            filling=tuple(status_table.filling.tolist()),
            waiting=tuple(status_table.waiting.tolist()),
            cpu=tuple(status_table.cpu[:, 0].tolist()),
            queued=tuple(status_table.cpu[:, 1].tolist()),
            stages=dict(zip(stages, status_table.clock.sum(axis=0).tolist(), strict=True)),
            copied=copied,
            restarts=dispatcher.restarts if dispatcher else 0,
        )
