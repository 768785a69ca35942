"""How much memory processes take, as far as the system tells (it is Linux that does)."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

WORKER_NAME = "shardprep-worker-"  # as processes.start names them


@dataclass(frozen=True)
class MemoryUse:
    """Bytes. ``ring`` holds the batches, shared by all processes; 0 without workers.

    ``main_peak`` and ``worker_peak`` (of the worker that had the most) are the most that ever was resident,
    the ring and mapped shards included; ``worker_own`` is what the largest worker shares with nobody, at the
    end. None where it is unknown, or there are no workers.
    """

    ring: int
    main_peak: int | None
    worker_peak: int | None
    worker_own: int | None

    @classmethod
    def now(cls, workers: Iterable[int], *, ring: int) -> MemoryUse:
        """Of this process and of these, its loader's."""
        status = [_status(pid) for pid in workers]
        return cls(
            ring=ring,
            main_peak=_status(os.getpid()).get("VmHWM"),
            worker_peak=max((s["VmHWM"] for s in status if "VmHWM" in s), default=None),
            worker_own=max((s["RssAnon"] for s in status if "RssAnon" in s), default=None),
        )


def worker_pids() -> set[int]:
    """All loaders' living workers."""
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
