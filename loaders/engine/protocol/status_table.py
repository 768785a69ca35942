"""A row of shared memory per worker, updated without messages: its current row, and its times."""

from __future__ import annotations

import os
from contextlib import suppress
from time import thread_time
from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.formats.system.descriptor import Descriptor
from shardprep.formats.system.owned import Inheritable, Owned
from shardprep.loaders.buffers.slots import SlotField, SlotLayout, SlotRing

IDLE = 0  # no lease has this number


SCHEDSTAT = "/proc/thread-self/schedstat"  # nanoseconds on a CPU, and runnable without one


class StatusTable(Inheritable):
    """Columns with one cell per worker. Picklable to a child that is being started.

    The engine writes ``run``: a worker does not begin leases of other runs. The worker writes the rest:
    ``lease`` and ``row`` are what it was at when it died; ``filling`` and ``waiting`` are the seconds of all
    workers that had this number, ``clock`` those of each stage of the work, ``cpu`` what a :class:`CpuClock`
    reads while filling.
    """

    def __init__(self, workers: int, stages: int) -> None:
        counters = [SlotField(name, (), np.int64) for name in ("run", "lease", "row")]
        seconds = [SlotField(name, (), np.float64) for name in ("filling", "waiting")]
        pairs = [SlotField("cpu", (2,), np.float64), SlotField("clock", (stages,), np.float64)]
        layout = SlotLayout(workers, (*counters, *seconds, *pairs))
        self._attach(SlotRing(layout, slots=1))

    def _attach(self, ring: SlotRing) -> None:
        columns = ring.layout.arrays(ring.memory(0), ring.layout.rows)
        self._ring = ring
        self.run: npt.NDArray[np.int64] = columns["run"]
        self.lease: npt.NDArray[np.int64] = columns["lease"]
        self.row: npt.NDArray[np.int64] = columns["row"]
        self.filling: npt.NDArray[np.float64] = columns["filling"]
        self.waiting: npt.NDArray[np.float64] = columns["waiting"]
        self.cpu: npt.NDArray[np.float64] = columns["cpu"]
        self.clock: npt.NDArray[np.float64] = columns["clock"]

    def place(self, worker: int) -> tuple[int, int]:
        """The worker's current lease and the row in it; (IDLE, 0) between leases."""
        return int(self.lease[worker]), int(self.row[worker])

    def close(self) -> None:
        self._ring.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _attached, (self._ring,)


def _attached(ring: SlotRing) -> StatusTable:
    status_table = StatusTable.__new__(StatusTable)
    status_table._attach(ring)
    return status_table


class CpuClock(Owned):
    """Seconds of the thread that makes it, since then: [on a CPU, runnable but not on one].

    The second is 0 except on Linux. A reading takes a microsecond.
    """

    def __init__(self) -> None:
        self._file = Descriptor(-1)
        with suppress(OSError):
            self._file = Descriptor(os.open(SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC))

    def read(self) -> npt.NDArray[np.float64]:
        on_cpu = (
            thread_time()
        )  # schedstat's first field is updated by ticks, which are longer than many leases
        file = self._file.fileno()
        if file < 0:
            return np.array((on_cpu, 0.0))
        _, queued, _ = os.pread(file, 64, 0).split()
        return np.array((on_cpu, int(queued) * 1e-9))
