"""One pass over an engine's plans, as its consumer and its dispatcher share it."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from .leases import Failure, LeasedBatch
from .plans import Shipment
from .slots import Memory


@dataclass(frozen=True, eq=False)
class Finished:
    """A batch and the memory that it lies in; its slot returns when that is dropped, wherever this got to."""

    batch: LeasedBatch
    memory: Memory


@dataclass(frozen=True, eq=False)
class Failed:
    """A batch that cannot be delivered, and why; its slot is taken back already."""

    batch: LeasedBatch
    failure: Failure


@dataclass(eq=False)
class Run:
    """Plans go in at one end, batches come out at the other, in order; neither end ever takes a lock.

    None as a result says that there will be no more: the run was stopped, or the dispatcher has ended.
    """

    number: int
    plans: deque[Shipment] = field(default_factory=deque)
    results: SimpleQueue[Finished | Failed | None] = field(default_factory=SimpleQueue)
    stopped: bool = False

    def stop(self) -> None:
        self.stopped = True
        self.results.put(None)

    def clear(self) -> None:
        """Let go of what nobody took."""
        with suppress(Empty):
            while True:
                self.results.get_nowait()
        self.results.put(None)
