"""Waiting for what other processes do, and the end of patience."""

from __future__ import annotations

import time

SHORTEST_S, LONGEST_S = 0.005, 0.1


class Pause:
    """Pauses that get longer."""

    def __init__(self) -> None:
        self._next_s = SHORTEST_S

    def wait(self) -> None:
        """Let some time pass."""
        time.sleep(self._next_s)
        self._next_s = min(LONGEST_S, 2 * self._next_s)


class Patience(Pause):
    """Pauses while others move on, and the time since the last of them did."""

    def __init__(self) -> None:
        super().__init__()
        self._state: object = None
        self._since = time.monotonic()

    def still_s(self, state: object) -> float:
        """Return for how many seconds the others have been in this state."""
        if state != self._state:
            self._state, self._since = state, time.monotonic()
        return time.monotonic() - self._since
