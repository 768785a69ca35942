"""The steps that one sender holds, and how many it may hold."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

FIRST_SIZE = 4  # steps; small, so that a slow sender does not begin with many
SLOW_GROWTH = 16  # steps that arrive in time for each one that a window grows, once it was shrunk


@dataclass
class SenderWindow:
    """``steps`` in the order in which the sender sends them, each with the number of its lease.

    A window has a size, at most ``wants``, as in TCP's congestion control. It grows by one step for each step
    that arrives. Where other senders have nothing to do because of this one, it is halved, and from then on
    grows by one step for every SLOW_GROWTH steps that arrive. This needs no clock, and where all senders wait
    for the consumer, no window is halved.
    """

    wants: int
    last_arrival: float
    steps: deque[tuple[int, int]] = field(default_factory=deque)
    is_suspended: bool = False
    has_begun: bool = False
    size: int = field(init=False)
    _steps_per_growth: int = field(init=False, default=1)
    _in_time: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.size = min(self.wants, FIRST_SIZE)

    @property
    def room(self) -> int:
        """The number of further steps that the sender may hold."""
        return max(0, self.size - len(self.steps))

    @property
    def is_nearly_empty(self) -> bool:
        """Whether the sender will soon have nothing to do."""
        return len(self.steps) <= self.size // 4

    def holds(self, step: int) -> bool:
        return any(held == step for _, held in self.steps)

    def shrink(self) -> None:
        """Halve the window, as others wait for it. Does nothing before the first step has arrived."""
        if not self.has_begun:  # it still starts its workers
            return
        self.size = max(1, self.size // 2)
        self._steps_per_growth, self._in_time = SLOW_GROWTH, 0

    def grow(self, steps: int) -> None:
        """Enlarge the window for ``steps`` steps that have arrived, or are lost."""
        self.has_begun = self.has_begun or steps > 0
        more, self._in_time = divmod(self._in_time + steps, self._steps_per_growth)
        self.size = min(self.wants, self.size + more)
