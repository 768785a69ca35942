"""Whether files can be read cold, that is: not from this machine's memory, and how."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from ...formats.filesystem import NETWORK_FILESYSTEMS
from .open_files import OpenFiles
from .page_cache import CAN_FORGET, forget, resident
from .plans import MAX_SPAN, Piece

COLD = 0.01  # the greatest share of pages in memory that still counts as cold
MEMORY_FILESYSTEMS = ("tmpfs", "ramfs", "hugetlbfs", "devtmpfs")  # tmpfs lets itself be opened with O_DIRECT
FADVISE, DIRECT = "posix_fadvise", "O_DIRECT"
TRIES, PAUSE = 6, 0.02  # pages in flight can be dropped once they have arrived


class ColdWay(NamedTuple):
    """How cold reads are had: ``posix_fadvise``, ``O_DIRECT``, or None with the reason."""

    method: str | None
    reason: str | None = None


def cold_way(files: OpenFiles, filesystem: str) -> ColdWay:
    """The first that works: pages dropped, with mincore(2) confirming it; or a way around the page cache."""
    if filesystem in MEMORY_FILESYSTEMS:
        return ColdWay(None, f"{filesystem} keeps its files in memory")
    try:
        return _by_page_cache(files, filesystem)
    except OSError as error:  # there are file systems that map no files
        return _by_direct(files, f"the system does not say what of it is in memory ({error.strerror})")


def _by_page_cache(files: OpenFiles, filesystem: str) -> ColdWay:
    first = files.descriptors[0]
    os.pread(first, 1, 0)
    if not resident(first, [(0, 1)])[0]:
        name = filesystem or "the file system"
        return ColdWay(None, f"{name} has a cache of its own that cannot be looked into")
    kept = drop([first], [(0, 0)], min(files.sizes[0], MAX_SPAN))
    if kept <= COLD:
        return ColdWay(FADVISE)
    return _by_direct(files, f"{kept:.0%} of the pages stayed in memory")


def _by_direct(files: OpenFiles, why_not: str) -> ColdWay:
    if files.open_direct():
        return ColdWay(DIRECT, why_not)
    return ColdWay(None, f"{why_not}, and it cannot be read with O_DIRECT")


def server_remarks(filesystem: str) -> tuple[str, ...]:
    """What cold does not mean on this file system."""
    if filesystem in NETWORK_FILESYSTEMS or filesystem.startswith("fuse"):
        return (f"on {filesystem}, cold is without this machine's memory; the server's own cannot be told",)
    return ()


def drop(files: Sequence[int], pieces: Sequence[Piece], block: int) -> float:
    """Have all pages of the files leave the cache; the share of the pieces' pages that stayed."""
    for _ in range(TRIES if CAN_FORGET else 1):
        for file in files:
            forget(file)
        kept = resident_part(files, pieces, block)
        if kept <= COLD:
            break
        time.sleep(PAUSE)
    return kept


def resident_part(files: Sequence[int], pieces: Sequence[Piece], block: int) -> float:
    """The share of the pieces' pages that are in memory."""
    spans = defaultdict(list)
    for file, offset in pieces:
        spans[file].append((offset, offset + block))
    counts = [resident(files[file], _joined(parts)) for file, parts in spans.items()]
    return sum(found for found, _ in counts) / max(1, sum(asked for _, asked in counts))


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Neighbours as one: a call of mincore for each would take longer than the reading."""
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if joined and joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return joined
