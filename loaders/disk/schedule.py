"""Steps of a measurement taken in turns, round after round, until the time is used up."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

ROUNDS = 3  # as many as there should be at least: a median of fewer is none
MOST_ROUNDS = 25
USED = 0.7  # the share of the time that is spent on reading; the rest goes to dropping and checking pages

Progress = Callable[[str, float], None]
"""Told what is being measured and the share of the time that is over, 0 to 1. Must not raise."""


class Step(Protocol):
    """Something that is measured once a round, for as long as it is told."""

    @property
    def title(self) -> str:
        """What is measured, for the progress bar."""

    @property
    def weight(self) -> int:
        """How many times the given seconds it takes."""

    def round(self, seconds: float) -> None:
        """Measure once."""


class Clock:
    """The time that a measurement may take in all."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._began = time.monotonic()

    @property
    def taken(self) -> float:
        return time.monotonic() - self._began

    @property
    def left(self) -> float:
        return self._seconds - self.taken

    @property
    def share(self) -> float:
        return min(1.0, self.taken / max(self._seconds, 1e-9))


def run(steps: Sequence[Step], clock: Clock, progress: Progress) -> None:
    """Every step once, whatever that takes, then again as long as what it took last time is left."""
    slot = USED * max(0.0, clock.left) / (ROUNDS * sum(step.weight for step in steps))
    took: dict[Step, float] = {}
    for number in range(MOST_ROUNDS):
        turn = [step for step in steps if not number or took[step] < clock.left]
        for step in turn:
            if number and took[step] > clock.left:
                continue
            progress(step.title, clock.share)
            began = clock.taken
            step.round(slot)
            took[step] = clock.taken - began
        if not turn:
            return
