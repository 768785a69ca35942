"""Numbers of items that several sources are asked for at once."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice


class SharedNumbers:
    """The same numbers for each of so many sources, which may draw them in any threads, some further ahead.

    A number is drawn when the first of them asks for it, and kept until the last has it.
    """

    def __init__(self, numbers: Iterable[int], sources: int) -> None:
        self._numbers = iter(numbers)
        self._lock = threading.Lock()
        self._waiting: list[deque[int]] = [deque() for _ in range(sources)]

    def of(self, source: int) -> Iterator[int]:
        """The numbers, for this source."""
        while True:
            with self._lock:
                number = self._next(source)
            if number is None:
                return
            yield number

    def _next(self, source: int) -> int | None:
        waiting = self._waiting[source]
        if not waiting:
            for number in islice(self._numbers, 1):
                for others in self._waiting:
                    others.append(number)
        return waiting.popleft() if waiting else None
