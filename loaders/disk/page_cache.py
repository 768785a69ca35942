"""The kernel's page cache: having files leave it, and asking what of them is in it."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np

_libc = ctypes.CDLL(None, use_errno=True)

CAN_FORGET = hasattr(os, "posix_fadvise")


def forget(descriptor: int) -> None:
    """Ask the kernel to drop all pages of an open file; it keeps those that are dirty, mapped or in flight.

    Without ``posix_fadvise`` nothing happens. What came of it, :func:`resident` tells.
    """
    with suppress(OSError):  # what cannot be flushed stays, and is seen to have stayed
        os.fsync(descriptor)
    if CAN_FORGET:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def resident(descriptor: int, spans: Iterable[tuple[int, int]] | None = None) -> tuple[int, int]:
    """(pages in memory, pages asked for) of an open file, by mincore(2).

    ``spans`` are (begin, end) in bytes, the whole file by default. Raises OSError where the file cannot
    be mapped. The kernel says that all pages are there to those who neither own the file nor may write it.
    """
    size = os.fstat(descriptor).st_size
    if not size:
        return 0, 0
    found = asked = 0
    with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as memory:
        data = np.frombuffer(memory, np.uint8)
        try:
            for begin, end in spans or ((0, size),):
                pages = _pages(data.ctypes.data, begin, min(end, size))
                found += int(np.count_nonzero(pages & 1))
                asked += len(pages)
        finally:
            del data  # or the map could not be closed
    return found, asked


def _pages(address: int, begin: int, end: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    begin -= begin % mmap.PAGESIZE
    pages = np.zeros(-(-(end - begin) // mmap.PAGESIZE), np.uint8)
    failed = _libc.mincore(
        ctypes.c_void_p(address + begin),
        ctypes.c_size_t(end - begin),
        pages.ctypes.data_as(ctypes.c_void_p),
    )
    if failed:
        raise OSError(ctypes.get_errno(), f"mincore: {os.strerror(ctypes.get_errno())}")
    return pages


def evict(path: Path) -> None:
    """:func:`forget` for a file that is not open."""
    with path.open("rb") as file:
        forget(file.fileno())


def resident_share(path: Path) -> float:
    """The share of the file's pages that are in memory, 0 for an empty file."""
    with path.open("rb") as file:
        found, asked = resident(file.fileno())
    return found / max(1, asked)
