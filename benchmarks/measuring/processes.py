"""CPU seconds and memory of processes, read from /proc."""

from __future__ import annotations

import os
from pathlib import Path

TICK = 1 / os.sysconf("SC_CLK_TCK")


def descendants(pid: int) -> list[int]:
    """The living descendants of a process."""
    found = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (thread / "children").read_text().split()):
            found += [child, *descendants(child)]
    return found


def cpu_seconds(pid: int) -> float:
    """User and system time of all its threads, to a hundredth of a second."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK


def own_memory(pid: int) -> int:
    """Bytes of private memory, without the ring and without the page cache behind a map."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise OSError(f"/proc/{pid}/status has no RssAnon")
