"""What a thread gets of the CPUs: time to compute, and time spent waiting for its turn."""

from __future__ import annotations

import os
from contextlib import suppress
from time import thread_time

import numpy as np
import numpy.typing as npt

SCHEDSTAT = "/proc/thread-self/schedstat"  # nanoseconds on a CPU, and runnable without one


class CpuClock:
    """Seconds of the thread that makes it, since then: [on a CPU, runnable but not on one].

    The second is 0 where the system does not tell (it is Linux that does). A microsecond per reading.
    """

    def __init__(self) -> None:
        self._file = -1
        with suppress(OSError):
            self._file = os.open(SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> npt.NDArray[np.float64]:
        on_cpu = thread_time()  # schedstat's own is as old as the last tick, which is longer than many leases
        if self._file < 0:
            return np.array((on_cpu, 0.0))
        _, queued, _ = os.pread(self._file, 64, 0).split()
        return np.array((on_cpu, int(queued) * 1e-9))

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)
