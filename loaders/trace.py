"""What an engine did when: leases in its workers, waiting in its consumer, batches that lay ready."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .work import Clock

if TYPE_CHECKING:
    from .leases import Lease
    from .loader import Loader

KEEP = 200_000  # spans of a kind, some 100 MB of JSON; a run of hours keeps its last ones


class LeaseSpan(NamedTuple):
    """A worker at ``rows`` rows, from ``first`` on, of a batch. ``stages`` are seconds of what the work times."""

    worker: int
    run: int
    batch: int
    first: int
    rows: int
    began: float
    ended: float
    stages: tuple[float, ...]


class Reception(NamedTuple):
    """The consumer asked for a batch at ``began``, ``got`` it, and had it in hand at ``ended``."""

    run: int
    batch: int
    rows: int
    began: float
    got: float
    ended: float


class Ready(NamedTuple):
    """So many batches lay ready from ``at`` on."""

    at: float
    batches: int


class _Underway(NamedTuple):
    lease: Lease
    sent: float


class Trace:
    """Recorded while :func:`tracing`; times are of perf_counter, of this process.

    ``leases``, ``receptions`` and ``ready`` are in the order of their ends, the last ``keep`` of each. A
    lease begins when the worker has it and is done with the one before; it ends when its answer is read.
    What it spends in the stages is right to within a row, for the worker may be at its next lease by then.
    """

    def __init__(self, clock: Clock, stages: tuple[str, ...], *, keep: int = KEEP) -> None:
        self.stages = stages
        self.leases: deque[LeaseSpan] = deque(maxlen=keep)
        self.receptions: deque[Reception] = deque(maxlen=keep)
        self.ready: deque[Ready] = deque(maxlen=keep)
        self.began = perf_counter()
        self._clock = clock
        self._read = clock.copy()
        self._free = [self.began] * len(clock)
        self._underway: list[deque[_Underway]] = [deque() for _ in clock]

    def leased(self, worker: int, lease: Lease) -> None:
        """The worker was sent the lease."""
        self._underway[worker].append(_Underway(lease, perf_counter()))

    def finished(self, worker: int, lease_id: int) -> None:
        """The worker is done with the lease. Those that it was sent before were another worker's to finish."""
        now, underway = perf_counter(), self._underway[worker]
        stages, began = self._spent(worker), self._free[worker]
        self._free[worker] = now
        while underway:
            lease, sent = underway.popleft()
            if lease.id == lease_id:
                place = worker, lease.run, lease.batch, lease.first, len(lease.items)
                self.leases.append(LeaseSpan(*place, max(sent, began), now, stages))
                return

    def filled_here(self, run: int, batch: int, rows: int, began: float) -> None:
        """The consumer has filled the batch itself."""
        now = perf_counter()
        self.leases.append(LeaseSpan(0, run, batch, 0, rows, began, now, self._spent(0)))
        self.receptions.append(Reception(run, batch, rows, began, now, now))

    def received(self, reception: Reception, ready: int) -> None:
        """The consumer has the batch; so many more lie ready."""
        self.receptions.append(reception)
        self.ready.append(Ready(reception.got, ready))

    def delivered(self, ready: int) -> None:
        """A batch was put to those that lie ready, which are so many now."""
        self.ready.append(Ready(perf_counter(), ready))

    def _spent(self, worker: int) -> tuple[float, ...]:
        now = self._clock[worker].copy()
        spent = np.maximum(0.0, now - self._read[worker])
        self._read[worker] = now
        return tuple(spent.tolist())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open. Raises OSError."""
        from .chrome_trace import chrome_json

        Path(path).write_text(chrome_json(self), encoding="ascii")


@contextmanager
def tracing(loader: Loader, *, keep: int = KEEP) -> Iterator[Trace]:
    """Record what the loader does within the context; the trace stays good after it, and after the loader.

    One trace at a time: a second one ends the first.
    """
    engine = loader._engine
    trace = engine.record(keep=keep)
    try:
        yield trace
    finally:
        engine.stop_recording(trace)
