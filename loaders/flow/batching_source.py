"""A step that can make whole batches itself, so that nobody copies their rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from .running import Pass


class BatchingSource(ABC):
    """Where ``can_batch`` says so, a following ``batch`` takes what :meth:`batches` yields."""

    @property
    @abstractmethod
    def can_batch(self) -> bool: ...

    @abstractmethod
    def batches(self, now: Pass, size: int, *, least: int) -> Iterator[Any]:
        """Fresh arrays of ``size`` rows in the form of the items, never written to again; of those that are left, if ``least``."""
