"""A line of shared memory per worker, written without a message: where it is, and how long things took."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .slots import Field, SlotLayout, SlotRing

IDLE = 0  # no lease has this number


class Board:
    """Columns of one cell per worker. Picklable to a child that is being started.

    ``run`` is the engine's word to a worker: leave leases of other runs alone. The rest is the worker's:
    ``lease`` and ``row`` tell what it was at when it died; ``filling`` and ``waiting`` are
    seconds of all the workers that had this number, ``clock`` those of each stage of the work, ``cpu`` what a
    :class:`CpuClock` reads while filling.
    """

    def __init__(self, workers: int, stages: int) -> None:
        counters = [Field(name, (), np.int64) for name in ("run", "lease", "row")]
        seconds = [Field(name, (), np.float64) for name in ("filling", "waiting")]
        pairs = [Field("cpu", (2,), np.float64), Field("clock", (stages,), np.float64)]
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
        """The lease and the row in it that the worker is at; (IDLE, 0) between leases."""
        return int(self.lease[worker]), int(self.row[worker])

    def close(self) -> None:
        self._ring.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _attached, (self._ring,)


def _attached(ring: SlotRing) -> Board:
    board = Board.__new__(Board)
    board._attach(ring)
    return board
