"""Where batches wait for the step: what a queue or a stage must do for the thread that feeds it."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Protocol

Leaves = list[Any]


class Status(IntEnum):
    """What an element is; batches are counted, the other two end a pass."""

    BATCH = 0
    END = 1
    ERROR = 2


class SinkClosed(Exception):
    """The sink takes and gives nothing any more."""


class PassEnded(Exception):
    """What was to be put is at its end, which only putting it found out."""


class Sink(Protocol):
    """Where elements wait for the step: first in, first out, between one thread that puts and one that takes."""

    capacity: int

    def put(self, status: Status, leaves: Leaves) -> None:
        """Wait for room and put an element; ``leaves`` count for batches. SinkClosed, PassEnded."""

    def level(self) -> int:
        """How many elements can be taken without waiting."""

    def take(self) -> tuple[Status, Leaves]:
        """The next element, which must be there."""

    def empty(self) -> None:
        """Let go of all elements. Nobody takes meanwhile; somebody may be waiting to put."""

    def close(self) -> None:
        """Let go of everything and wake who waits. Idempotent."""
