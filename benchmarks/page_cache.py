"""Files out of the page cache, and proof of it."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np

_libc = ctypes.CDLL(None, use_errno=True)


def evict(path: Path) -> None:
    """Ask the kernel to forget the file's pages; it keeps those that are dirty or mapped somewhere."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def resident_share(path: Path) -> float:
    """The share of the file's pages that are in memory, by mincore(2)."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
        data = np.frombuffer(memory, np.uint8)
        pages = np.zeros(-(-data.size // mmap.PAGESIZE), np.uint8)
        failed = _libc.mincore(
            ctypes.c_void_p(data.ctypes.data),
            ctypes.c_size_t(data.size),
            pages.ctypes.data_as(ctypes.c_void_p),
        )
        del data
    if failed:
        raise OSError(ctypes.get_errno(), "mincore", str(path))
    return float((pages & 1).mean())
