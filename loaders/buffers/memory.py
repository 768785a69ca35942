"""Memory for arrays, and how much of it is available."""

from __future__ import annotations

import ctypes
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

ALIGNMENT = 64  # bytes, so that TensorFlow takes an array without a copy; it aborts on a smaller alignment
CGROUPS = Path("/sys/fs/cgroup")


# glibc's malloc.h. If a decoded image is at the heap's end, freeing it shrinks the heap, and the next image
# causes up to 16 page faults, 25 µs of CPU.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3

TRIM_THRESHOLD_BYTES, MMAP_THRESHOLD_BYTES = 64 << 20, 32 << 20
MAX_IDLE_PIECES = 8  # pieces of memory that are kept while no array uses them
MIN_RECYCLED_BYTES = 1 << 20  # malloc keeps smaller pieces itself


def aligned(size: int) -> npt.NDArray[np.uint8]:
    """Return new, uninitialised bytes that start at a multiple of ALIGNMENT."""
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size]


def is_usable(memory: npt.NDArray[np.uint8]) -> bool:
    """Whether arrays may be views of ``memory``: it is aligned and writable."""
    return bool(memory.ctypes.data % ALIGNMENT == 0 and memory.flags.writeable)


def anonymous_file() -> int:
    """Return a descriptor of an empty file without a name, freed with its last descriptor and map."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("shardprep")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def available() -> int | None:
    """Available bytes: the least of MemAvailable and the limits of this process's control groups.

    None where neither is known. A group's limit counts in full, without subtracting its use, because most of
    that is page cache, which the kernel frees.
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


def keep_freed_memory() -> None:
    """Make this process keep freed memory for reuse; without glibc nothing changes."""
    with suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)
        mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)


class Recycled:
    """Function of a size that returns :func:`aligned` memory, reused if a piece of this size is idle.

    The system gives new memory of a batch's size page by page, which takes as long as filling it. A piece is
    idle again when it and every view of it are dropped, in any thread. Only one thread may call it.
    """

    def __init__(self) -> None:
        self._idle: deque[npt.NDArray[np.uint8]] = deque(maxlen=MAX_IDLE_PIECES)

    def __call__(self, size: int) -> npt.NDArray[np.uint8]:
        if size < MIN_RECYCLED_BYTES:
            return aligned(size)
        owner = self._found(size)
        lent = np.frombuffer(owner.data, np.uint8)  # views of it keep it, and not its owner
        weakref.finalize(lent, self._idle.append, owner).atexit = False
        return lent

    def _found(self, size: int) -> npt.NDArray[np.uint8]:
        for _ in range(len(self._idle)):
            memory = self._idle.popleft()
            if memory.size == size:
                return memory
            self._idle.append(memory)
        return aligned(size)
