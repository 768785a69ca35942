"""The interface of a queue or stage for the thread that feeds it."""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol

from shardprep.loaders.tf_inputs.tensors.signature import Leaves


class Status(IntEnum):
    """The kind of an element: a batch, or the end of a pass."""

    BATCH = 0
    END = 1
    ERROR = 2


class SinkClosed(Exception):
    """The sink is closed, and accepts and delivers no elements."""


class PassEnded(Exception):
    """The pass has ended, which only the attempt to put an element has shown."""


class Sink(Protocol):
    """A first-in, first-out store of elements between one thread that puts and one that takes."""

    capacity: int

    def put(self, status: Status, leaves: Leaves) -> None:
        """Wait for a place and put an element; only a batch has ``leaves``. Raises SinkClosed, PassEnded."""

    def level(self) -> int:
        """Return how many elements can be taken without waiting."""

    def take(self) -> tuple[Status, Leaves]:
        """Return the next element. The sink must not be empty."""

    def empty(self) -> None:
        """Drop all elements. No thread takes at the same time; one may wait to put."""

    def close(self) -> None:
        """Drop all elements and wake waiting threads. Idempotent."""
