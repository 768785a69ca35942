"""Where an engine's time went."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from time import perf_counter
from typing import Any, Self

from .board import Board
from .dispatcher import Dispatcher


@dataclass(frozen=True)
class EngineStats:
    """Counts and seconds since the engine was made, or since other stats of it (:meth:`since`).

    ``elapsed`` is how long runs were under way, each from its first batch on; ``warming`` the time before.
    The consumer was ``starved`` while it waited for a batch after the first, and its thread spent ``handing``
    on handing batches over; the workers were ``blocked`` while all slots were taken. ``filling`` and
    ``waiting`` have one entry per worker, and so have ``cpu`` and ``queued``: how much of the filling was on
    a CPU, and how much was spent waiting for one; ``stages`` sums what the work timed.
    ``rows`` and ``batches`` were delivered, ``timed`` of these rows while runs were under way, that is not in
    a first batch; ``copied`` of the batches because too many were held;
    ``restarts`` is how many workers had to be replaced.
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

    def since(self, before: Self) -> Self:
        """What came after ``before``, earlier stats of the same engine."""
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
    """What the consumer's side counts; one thread at a time does."""

    rows: int = 0
    timed: int = 0
    batches: int = 0
    warming: float = 0.0
    starved: float = 0.0
    handing: float = 0.0
    _elapsed: float = 0.0
    _first: float | None = None  # when the run under way gave its first batch
    _is_first: bool = False

    def waited(self, seconds: float) -> None:
        """The consumer waited so long for a batch, which it has now."""
        self._is_first = self._first is None
        if self._is_first:
            self._first = perf_counter()
            self.warming += seconds
        else:
            self.starved += seconds

    def handed(self, rows: int, seconds: float) -> None:
        """The batch was handed over, which took so long."""
        self.batches += 1
        self.rows += rows
        self.timed += 0 if self._is_first else rows
        self.handing += seconds

    @contextmanager
    def run(self) -> Iterator[None]:
        """Within it a run is under way."""
        try:
            yield
        finally:
            self._elapsed, self._first = self.elapsed, None

    @property
    def elapsed(self) -> float:
        first = self._first
        return self._elapsed if first is None else self._elapsed + perf_counter() - first

    def read(
        self, board: Board, stages: tuple[str, ...], *, dispatcher: Dispatcher | None, copied: int
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
            filling=tuple(board.filling.tolist()),
            waiting=tuple(board.waiting.tolist()),
            cpu=tuple(board.cpu[:, 0].tolist()),
            queued=tuple(board.cpu[:, 1].tolist()),
            stages=dict(zip(stages, board.clock.sum(axis=0).tolist(), strict=True)),
            copied=copied,
            restarts=dispatcher.restarts if dispatcher else 0,
        )
