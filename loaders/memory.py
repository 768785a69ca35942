"""Memory: pieces of it as arrays need them, and how much there is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

ALIGNMENT = 64  # what TensorFlow needs to take an array without a copy; it aborts on less
CGROUPS = Path("/sys/fs/cgroup")


def aligned(size: int) -> npt.NDArray[np.uint8]:
    """Fresh, uninitialised bytes that start at a multiple of ALIGNMENT."""
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size]


def is_usable(memory: npt.NDArray[np.uint8]) -> bool:
    """Whether arrays may be views of it: it starts at a multiple of ALIGNMENT, and can be written to."""
    return bool(memory.ctypes.data % ALIGNMENT == 0 and memory.flags.writeable)


def available() -> int | None:
    """Bytes: the least of MemAvailable and this process's control groups' limits; None where nobody says.

    A group's limit counts whole, not less its use: most of that is page cache, which gives way.
    """
    return min([*_meminfo("/proc/meminfo"), *_group_limits("/proc/self/cgroup")], default=None)


def _meminfo(path: str) -> Iterator[int]:
    for line in _lines(Path(path)):
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            yield int(rest.split()[0]) << 10


def _group_limits(path: str) -> Iterator[int]:
    for line in _lines(Path(path)):
        _, controllers, group = line.split(":", 2)
        if not controllers:
            yield from _limits_upwards(CGROUPS, group, "memory.max")
        elif "memory" in controllers.split(","):
            yield from _limits_upwards(CGROUPS / "memory", group, "memory.limit_in_bytes")


def _limits_upwards(root: Path, group: str, name: str) -> Iterator[int]:
    inner = root / group.lstrip("/")
    for folder in (inner, *inner.parents):
        yield from (int(line) for line in _lines(folder / name) if line.isdecimal())  # not "max"
        if folder == root:
            return


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
