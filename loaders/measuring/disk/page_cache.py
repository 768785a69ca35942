"""Reading files cold, that is, not from this machine's memory: whether that is possible, and how."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shardprep.formats.system.filesystem import NETWORK_FILESYSTEMS

from .read_plans import MAX_SPAN, Piece
from .target import OpenFiles

_libc = ctypes.CDLL(None, use_errno=True)


CAN_FORGET = hasattr(os, "posix_fadvise")


COLD = 0.01  # the greatest share of pages in memory that still counts as cold
MEMORY_FILESYSTEMS = ("tmpfs", "ramfs", "hugetlbfs", "devtmpfs")  # tmpfs files can be opened with O_DIRECT
FADVISE, DIRECT = "posix_fadvise", "O_DIRECT"
TRIES, PAUSE_S = 6, 0.02  # pages in flight can be dropped once they have arrived


def forget(descriptor: int) -> None:
    """Ask the kernel to drop all pages of an open file; it keeps those that are dirty, mapped or in flight.

    Without ``posix_fadvise`` nothing happens. :func:`resident` reports which pages are left.
    """
    with suppress(OSError):  # pages that cannot be flushed stay, which `resident` reports
        os.fsync(descriptor)
    if CAN_FORGET:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def resident(descriptor: int, spans: Iterable[tuple[int, int]] | None = None) -> tuple[int, int]:
    """Return (pages in memory, pages checked) of an open file, by mincore(2).

    ``spans`` are (begin, end) in bytes, by default the whole file. Raises OSError where the file cannot be
    mapped. To a process that neither owns the file nor may write it, the kernel reports all pages as in
    memory.
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
            del data  # the map cannot be closed while a view of it exists
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
    """Apply :func:`forget` to a file that is not open."""
    with path.open("rb") as file:
        forget(file.fileno())


def resident_share(path: Path) -> float:
    """The share of the file's pages that are in memory; 0 for an empty file."""
    with path.open("rb") as file:
        found, asked = resident(file.fileno())
    return found / max(1, asked)


class ColdWay(NamedTuple):
    """The method of cold reads: ``posix_fadvise``, ``O_DIRECT``, or None with the reason."""

    method: str | None
    reason: str | None = None


def cold_way(files: OpenFiles, filesystem: str) -> ColdWay:
    """Return the first method that works: dropping pages, confirmed by mincore(2), or O_DIRECT."""
    if filesystem in MEMORY_FILESYSTEMS:
        return ColdWay(None, f"{filesystem} keeps its files in memory")
    try:
        return _by_page_cache(files, filesystem)
    except OSError as error:  # some file systems do not support maps
        return _by_direct(
            files, f"the system does not say which of its pages are in memory ({error.strerror})"
        )


def _by_page_cache(files: OpenFiles, filesystem: str) -> ColdWay:
    first = files.descriptors[0]
    os.pread(first, 1, 0)
    if not resident(first, [(0, 1)])[0]:
        name = filesystem or "the file system"
        return ColdWay(None, f"{name} has its own cache, which cannot be checked")
    kept = drop([first], [(0, 0)], min(files.sizes[0], MAX_SPAN))
    if kept <= COLD:
        return ColdWay(FADVISE)
    return _by_direct(files, f"{kept:.0%} of the pages stayed in memory")


def _by_direct(files: OpenFiles, why_not: str) -> ColdWay:
    if files.open_direct():
        return ColdWay(DIRECT, why_not)
    return ColdWay(None, f"{why_not}, and it cannot be read with O_DIRECT")


def server_remarks(filesystem: str) -> tuple[str, ...]:
    """Remarks on what cold reads do not exclude on this file system."""
    if filesystem in NETWORK_FILESYSTEMS or filesystem.startswith("fuse"):
        return (f"on {filesystem}, cold means not in this machine's memory; the server's memory is unknown",)
    return ()


def drop(files: Sequence[int], pieces: Sequence[Piece], block: int) -> float:
    """Drop all pages of the files from the page cache; return the share of the pieces' pages that stayed."""
    for _ in range(TRIES if CAN_FORGET else 1):
        for file in files:
            forget(file)
        kept = resident_part(files, pieces, block)
        if kept <= COLD:
            break
        time.sleep(PAUSE_S)
    return kept


def resident_part(files: Sequence[int], pieces: Sequence[Piece], block: int) -> float:
    """The share of the pieces' pages that are in memory."""
    spans = defaultdict(list)
    for file, offset in pieces:
        spans[file].append((offset, offset + block))
    counts = [resident(files[file], _joined(parts)) for file, parts in spans.items()]
    return sum(found for found, _ in counts) / max(1, sum(asked for _, asked in counts))


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join adjacent spans: a call of mincore for each would take longer than reading them."""
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if joined and joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return joined
