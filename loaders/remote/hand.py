"""What one sender holds, and how much of it at a time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

FIRST = 4  # steps that a sender may hold at first: a slow one is not to begin with many
GROWTH = 16  # steps that come in time for each more that a sender may hold


@dataclass
class Hand:
    """``steps`` in the order in which it will send them, each with its lease's number.

    It wants at most ``wants``, and gets ``share`` of them: one more for each step that comes, until others have
    nothing to do because of it; half as many whenever that happens, and from then on one more for every GROWTH steps that
    come in time. So TCP finds what a path carries; it needs no clock, and takes nothing from anybody where it is the
    consumer that all wait for.
    """

    wants: int
    last_heard: float
    steps: deque[tuple[int, int]] = field(default_factory=deque)
    is_asleep: bool = False
    has_begun: bool = False
    share: int = field(init=False)
    _growth: int = field(init=False, default=1)
    _in_time: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.share = min(self.wants, FIRST)

    @property
    def room(self) -> int:
        """How many more steps it may hold."""
        return max(0, self.share - len(self.steps))

    @property
    def is_dry(self) -> bool:
        """Whether it will soon have nothing to do."""
        return len(self.steps) <= self.share // 4

    def holds(self, step: int) -> bool:
        return any(held == step for _, held in self.steps)

    def held_up(self) -> None:
        """Others ran dry, waiting for what it holds; who has yet to start its workers is not slow for that."""
        if not self.has_begun:
            return
        self.share = max(1, self.share // 2)
        self._growth, self._in_time = GROWTH, 0

    def delivered(self, steps: int) -> None:
        """So many of them came, or will not."""
        self.has_begun = self.has_begun or steps > 0
        more, self._in_time = divmod(self._in_time + steps, self._growth)
        self.share = min(self.wants, self.share + more)
