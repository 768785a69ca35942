"""File reads of a measurement: which bytes, in which order, and cold if possible.

Pieces are read with preadv(2) by ``depth`` processes, because sixteen threads that share the GIL read a third
less from memory than sixteen threads of a C program.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import WorkerDied
from shardprep.formats.runtime.files import OPEN_FLAGS

PAGE = 4096  # bytes; O_DIRECT reads whole pages
MAX_SPAN = min(1 << 30, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 8)
MAX_READS = 4096  # in a random pass, so that the check for cold pages is quick

# On some processors a copy to the start of a page is up to a tenth slower, because source and target share
# their low address bits; on others a copy to 16 bytes past it, as from malloc. O_DIRECT needs whole pages.
CACHE_LINE = 64

DIRECT_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT
READER = Path(__file__).with_name("reader_process.py")

Pieces = npt.NDArray[np.int64]
"""[N, 2]: file numbers and offsets."""


def block_size(size: int) -> str:
    """Format a number of whole KiB.

    >>> block_size(1 << 16), block_size(1 << 22)
    ('64 KiB', '4 MiB')
    """
    return f"{size >> 10} KiB" if size % (1 << 20) else f"{size >> 20} MiB"


class OpenFiles:
    """Open files and their sizes; the next forward pass begins after the share ``passed`` of them."""

    def __init__(self, descriptors: Iterable[int]) -> None:
        self.descriptors = tuple(descriptors)
        self.sizes = tuple(os.fstat(descriptor).st_size for descriptor in self.descriptors)
        self.passed = 0.0

    @classmethod
    def of(cls, paths: Sequence[Path], stack: ExitStack) -> OpenFiles:
        """Open files, which the stack closes. Raises OSError."""
        descriptors = []
        for path in paths:
            descriptors.append(os.open(path, OPEN_FLAGS))
            stack.callback(os.close, descriptors[-1])
        return cls(descriptors)


@dataclass(frozen=True)
class Pattern:
    """Reads of ``block`` bytes by ``depth`` processes, which request pieces ``ahead`` of their reads.

    In a ``folder``, the file with this number as its name is opened before each read, and closed after it.
    """

    block: int
    depth: int = 1
    random: bool = False
    ahead: int = 0
    folder: str = ""

    @classmethod
    def of_records(cls, record_bytes: int, *, depth: int = 1, folder: str = "") -> Pattern:
        """Return the pattern of records at random places, rounded up to whole pages."""
        return cls(-(-record_bytes // PAGE) * PAGE, depth, random=True, folder=folder)

    def pieces(self, files: OpenFiles) -> Pieces:
        """Return the distinct pieces of a pass, at most MAX_SPAN bytes in total.

        A random pass has at most MAX_READS whole blocks in a new order. A forward pass continues cyclically
        where the last one ended, so that the disk does not read from its own cache.
        """
        sizes = np.array(files.sizes, np.int64)
        blocks = np.maximum(1, sizes // self.block) if self.random else -(-sizes // self.block)
        ends = np.cumsum(blocks)
        total = int(ends[-1])
        count = max(1, min(total, MAX_SPAN // self.block))
        if self.random:
            numbers = np.random.default_rng().choice(total, min(count, MAX_READS), replace=False)
        else:
            numbers = (int(files.passed * total) + np.arange(count)) % total
        owners = np.searchsorted(ends, numbers, side="right")
        return np.column_stack((owners, (numbers - (ends - blocks)[owners]) * self.block))

    def __str__(self) -> str:
        if self.folder:
            return "open, preadv and close of each in random order"
        order = "at random places" if self.random else "forward"
        ahead = f", requested {self.ahead} pieces ahead" if self.ahead else ""
        processes = f" by {self.depth} processes" if self.depth > 1 else ""
        return f"preadv of {block_size(self.block)} {order}{processes}{ahead}"


def read(
    files: Sequence[int], pieces: Pieces, pattern: Pattern, *, seconds: float, direct: bool = False
) -> tuple[float, Pieces]:
    """Read the pieces in order for at most ``seconds``; each process reads every ``depth``-th, at least one.

    ``files`` are descriptors, opened again with O_DIRECT if ``direct``. Returns the bytes per second until
    the last process ended, and the pieces that were read. Raises OSError, and WorkerDied if a reading process
    is killed.
    """
    for file in files:
        advice = os.POSIX_FADV_RANDOM if pattern.random else os.POSIX_FADV_SEQUENTIAL
        os.posix_fadvise(file, 0, 0, advice)
    depth, ahead = min(pattern.depth, len(pieces)), 0 if direct else pattern.ahead
    flags = DIRECT_FLAGS if direct else OPEN_FLAGS if pattern.folder else 0
    options = (pattern.folder, seconds, depth, pattern.block, 0 if direct else CACHE_LINE, ahead, flags)
    numbers = np.arange(len(files)) if pattern.folder else np.array(files, np.int64)
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(READER), *map(str, options)],
        input=np.column_stack((numbers[pieces[:, 0]], pieces[:, 1])).tobytes(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=files,
    )
    reports = np.array([line.split() for line in done.stdout.splitlines()], float).reshape(-1, 6)
    if done.returncode or len(reports) != depth:
        raise WorkerDied("a reading process ended early; check whether the system is out of memory")
    for error in map(int, reports[:, 3]):
        if error:
            raise OSError(error, os.strerror(error))
    passed = [pieces[int(number) :: depth][: int(count)] for number, count in reports[:, :2]]
    return reports[:, 2].sum() / max(reports[:, 5].max() - reports[:, 4].min(), 1e-9), np.concatenate(passed)


COLD = 0.01  # the largest share of pages in memory that counts as cold
MEMORY_FILESYSTEMS = ("tmpfs", "ramfs", "hugetlbfs", "devtmpfs")  # tmpfs files can be opened with O_DIRECT
FADVISE, DIRECT = "posix_fadvise", "O_DIRECT"
TRIES, PAUSE_S = 6, 0.02  # pages in flight can be dropped only after they have arrived

_libc = ctypes.CDLL(None, use_errno=True)


class ColdWay(NamedTuple):
    """The method of cold reads: "posix_fadvise", "O_DIRECT", or None with the reason."""

    method: str | None
    reason: str | None = None


def cold_way(files: OpenFiles, filesystem: str) -> ColdWay:
    """Return the first method that works: dropped pages, confirmed by mincore(2), or O_DIRECT."""
    if filesystem in MEMORY_FILESYSTEMS:
        return ColdWay(None, f"{filesystem} keeps its files in memory")
    first, start = files.descriptors[:1], np.zeros((1, 2), np.int64)
    with suppress(OSError):  # some file systems do not support maps
        os.pread(first[0], 1, 0)
        if not resident(first, start, 1):
            return ColdWay(None, f"{filesystem or 'the system'} has its own cache, which cannot be checked")
        if drop(first, start, min(files.sizes[0], MAX_SPAN)) <= COLD:
            return ColdWay(FADVISE)
    why_not = "its pages stayed in memory"
    with suppress(OSError):
        for file in files.descriptors:
            os.close(os.open(f"/dev/fd/{file}", DIRECT_FLAGS))
        return ColdWay(DIRECT, why_not)
    return ColdWay(None, f"{why_not}, and it cannot be read with O_DIRECT")


def drop(files: Sequence[int], pieces: Pieces, block: int) -> float:
    """Drop the files from the page cache; return the share of the pieces' pages that stayed."""
    for _ in range(TRIES):
        for file in files:
            forget(file)
        kept = resident(files, pieces, block)
        if kept <= COLD:
            break
        time.sleep(PAUSE_S)
    return kept


def forget(descriptor: int) -> None:
    """Ask the kernel to drop an open file's pages; dirty, mapped and in-flight ones stay."""
    with suppress(OSError):  # `resident` reports the pages that cannot be flushed
        os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def resident(files: Sequence[int], pieces: Pieces, block: int) -> float:
    """Return the share of the pieces' pages that are in memory, by mincore(2).

    Raises OSError if a file cannot be mapped. If this process neither owns a file nor may write it, the
    kernel reports all its pages as in memory.
    """
    found = asked = 0
    states = np.zeros(-(-block // mmap.PAGESIZE) + 1, np.uint8)
    target = states.ctypes.data_as(ctypes.c_void_p)
    for file in np.unique(pieces[:, 0]).tolist():
        with mmap.mmap(files[file], 0, prot=mmap.PROT_READ) as memory:
            address = np.frombuffer(memory, np.uint8).ctypes.data
            for offset in pieces[pieces[:, 0] == file, 1].tolist():
                begin = offset - offset % mmap.PAGESIZE
                length = min(offset + block, len(memory)) - begin
                if _libc.mincore(ctypes.c_void_p(address + begin), ctypes.c_size_t(length), target):
                    raise OSError(ctypes.get_errno(), f"mincore: {os.strerror(ctypes.get_errno())}")
                pages = -(-length // mmap.PAGESIZE)
                found, asked = found + int(np.count_nonzero(states[:pages] & 1)), asked + pages
    return found / max(1, asked)


def resident_share(path: Path) -> float:
    """Return the share of the file's pages in memory; 0 for an empty file."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        return resident([file.fileno()], np.zeros((1, 2), np.int64), size) if size else 0.0
