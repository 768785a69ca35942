"""The end of a pass as several replicas of one step find it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

COMPANY = 1.0  # seconds that the first replica gives the others; too few threads for all may keep them away


class ReplicaEnds:
    """Has one replica tell of the end of each pass, once all of them have taken it.

    Telling is raising, which aborts the step of all; an end that another had not yet taken would be left
    for the next pass. Thread-safe.
    """

    def __init__(self, all_taken: Callable[[], bool]) -> None:
        self._all_taken = all_taken
        self._lock = threading.Lock()
        self._number = 0  # of the pass whose end was found last

    def found(self, number: int, tell: Callable[[], None]) -> None:
        """A replica took the end of this pass. The first calls ``tell``, which raises; the others come back."""
        with self._lock:
            is_first, self._number = number != self._number, number
        if not is_first:
            return
        deadline = time.monotonic() + COMPANY
        while not self._all_taken() and time.monotonic() < deadline:
            time.sleep(0.0005)
        tell()
