"""How full a queue is, and who waits for whom."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class InputStats:
    """An input since it was made; those that hold nothing back have capacity 0.

    ``fed`` batches went in, ``batches`` came out. ``level`` are in it now, ``mean_level`` were on average whenever
    another came. ``starved`` is the share of steps that found it empty, ``blocked`` the share of batches that found it full;
    ``starved_seconds`` and ``blocked_seconds`` are how long these waited. ``source`` is what it is fed by.

    A step that dequeues inside of a graph cannot be seen waiting: there, ``starved`` is the share of batches
    that came to an empty queue, and ``starved_seconds`` is 0.
    """

    name: str
    capacity: int
    level: int
    mean_level: float
    fed: int
    batches: int
    epochs: int
    starved: float
    blocked: float
    starved_seconds: float
    blocked_seconds: float
    source: InputStats | None = None

    def to_dict(self) -> dict[str, Any]:
        """The same in plain JSON values."""
        return asdict(self)


class Occupancy:
    """Counts for :class:`InputStats`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fed = self._taken = self._levels = self._found_full = self._found_empty = self._epochs = 0
        self._starved = self._blocked = 0.0

    def fed(self, level: int, *, full: bool, seconds: float, unseen: bool) -> None:
        """A batch came while ``level`` were there, and waited for room if it was ``full``.

        ``unseen`` steps take batches without telling; then it counts as their having waited if none was there.
        """
        with self._lock:
            self._fed += 1
            self._levels += level
            self._found_full += full
            self._blocked += seconds if full else 0.0
            if unseen:
                self._taken += 1
                self._found_empty += level == 0

    def taken(self, *, waited: float | None) -> None:
        """A step got a batch, for which it had to wait so many seconds, or not at all."""
        with self._lock:
            self._taken += 1
            self._found_empty += waited is not None
            self._starved += waited or 0.0

    def epoch(self) -> None:
        with self._lock:
            self._epochs += 1

    def read(self, name: str, *, capacity: int, level: int, source: InputStats | None = None) -> InputStats:
        with self._lock:
            return InputStats(
                name=name,
                capacity=capacity,
                level=level,
                mean_level=self._levels / max(1, self._fed),
                fed=self._fed,
                batches=self._taken,
                epochs=self._epochs,
                starved=self._found_empty / max(1, self._taken),
                blocked=self._found_full / max(1, self._fed),
                starved_seconds=self._starved,
                blocked_seconds=self._blocked,
                source=source,
            )
