"""The memory of processes, where the system reports it (Linux)."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

WORKER_NAME = "shardprep-worker-"  # as engine.worker_process names them


@dataclass(frozen=True)
class MemoryUse:
    """Memory in bytes. ``ring`` is the memory of the slots, shared by all processes; 0 without workers.

    ``main_peak`` and ``worker_peak`` (of the worker with the most) are the greatest resident sizes, the ring
    included; ``worker_own`` is the greatest private memory of a worker at the end. None where it is unknown,
    or there are no workers.
    """

    ring: int
    main_peak: int | None
    worker_peak: int | None
    worker_own: int | None

    @classmethod
    def now(cls, workers: Iterable[int], *, ring: int) -> MemoryUse:
        """Return the use of this process and of its loader's ``workers``."""
        status = [_status(pid) for pid in workers]
        return cls(
            ring=ring,
            main_peak=_status(os.getpid()).get("VmHWM"),
            worker_peak=max((s["VmHWM"] for s in status if "VmHWM" in s), default=None),
            worker_own=max((s["RssAnon"] for s in status if "RssAnon" in s), default=None),
        )


def worker_pids() -> set[int]:
    """The process ids of all loaders' living workers."""
    children = multiprocessing.active_children()
    return {child.pid for child in children if child.pid and child.name.startswith(WORKER_NAME)}


def _status(pid: int) -> dict[str, int]:
    """Sizes in bytes, by their names in /proc; empty where there is none, or the process is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    values = [line.split() for line in lines if line.endswith(" kB")]
    return {name.rstrip(":"): int(size) << 10 for name, size, _ in values}
