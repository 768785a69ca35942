"""Where an engine's time went."""

from __future__ import annotations

from dataclasses import dataclass

from .board import Board
from .dispatcher import Dispatcher


@dataclass(frozen=True)
class EngineStats:
    """Counts and seconds since the engine was made.

    The consumer was ``starved`` while it waited for a batch; the workers were ``blocked`` while all slots
    were taken. ``filling`` and ``waiting`` have one entry per worker, ``stages`` sums what the work timed.
    ``rows`` and ``batches`` were delivered, ``copied`` of these batches because too many were held;
    ``restarts`` is how many workers had to be replaced.
    """

    rows: int
    batches: int
    starved: float
    blocked: float
    filling: tuple[float, ...]
    waiting: tuple[float, ...]
    stages: dict[str, float]
    copied: int
    restarts: int


@dataclass
class Meter:
    """What the consumer's side counts."""

    rows: int = 0
    batches: int = 0
    starved: float = 0.0

    def count(self, rows: int) -> None:
        self.batches += 1
        self.rows += rows

    def read(
        self, board: Board, stages: tuple[str, ...], *, dispatcher: Dispatcher | None, copied: int
    ) -> EngineStats:
        return EngineStats(
            rows=self.rows,
            batches=self.batches,
            starved=self.starved,
            blocked=dispatcher.blocked if dispatcher else 0.0,
            filling=tuple(board.filling.tolist()),
            waiting=tuple(board.waiting.tolist()),
            stages=dict(zip(stages, board.clock.sum(axis=0).tolist(), strict=True)),
            copied=copied,
            restarts=dispatcher.restarts if dispatcher else 0,
        )
