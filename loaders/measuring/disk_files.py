"""File reads of a measurement: which bytes, in which order, and cold if possible.

Pieces are read with preadv(2) by ``depth`` processes, because sixteen threads that share the GIL read a third
less from memory than sixteen threads of a C program.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import NoSpace, UsageError, WorkerDied
from shardprep.formats.runtime.files import OPEN_FLAGS, filesystem_type, naming
from shardprep.formats.runtime.owned import Owned
from shardprep.formats.runtime.workers import START_TIMEOUT_S
from shardprep.formats.shards.manifest import MANIFEST_NAME, read_manifest
from shardprep.loaders.measuring import reader_process
from shardprep.loaders.measuring.reader_process import ANSWER, ORDER, REPORT

PAGE = 4096  # bytes; O_DIRECT reads whole pages
MAX_FILES = 128  # far below any limit on open files
RECORD_BYTES = 110_000  # the mean size of an ImageNet JPEG


@dataclass(eq=False)
class OpenFiles(Owned):
    """Descriptors that the stack closes; the next forward pass begins after the share ``passed``."""

    stack: ExitStack
    descriptors: tuple[int, ...]
    direct: list[int] = field(default_factory=list)
    passed: float = 0.0

    @classmethod
    def of(cls, paths: Sequence[Path], stack: ExitStack) -> OpenFiles:
        descriptors = []
        for path in paths:
            descriptors.append(os.open(path, OPEN_FLAGS))
            stack.callback(os.close, descriptors[-1])
            with naming(path):
                os.pread(descriptors[-1], 1, 0)
        return cls(stack, tuple(descriptors))

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(os.fstat(descriptor).st_size for descriptor in self.descriptors)

    def open_direct(self) -> bool:
        """Open all files with O_DIRECT too; return whether that is possible. Idempotent."""
        flag = getattr(os, "O_DIRECT", 0)
        with suppress(OSError):
            for descriptor in self.descriptors[len(self.direct) :] if flag else ():
                name = f"/proc/self/fd/{descriptor}"  # a scratch file has no other name
                self.direct.append(os.open(name, os.O_RDONLY | os.O_CLOEXEC | flag))
                self.stack.callback(os.close, self.direct[-1])
        return len(self.direct) == len(self.descriptors)


@dataclass(frozen=True)
class Target:
    """Files to read, in a loader's order; ``place`` is a writable folder on their disk, if there is one."""

    path: Path
    kind: str
    files: OpenFiles
    record_bytes: int
    place: Path | None
    remarks: tuple[str, ...] = ()

    @property
    def filesystem(self) -> str:
        return filesystem_type(self.path)


def open_target(path: Path, stack: ExitStack, *, seconds: float, record_bytes: int | None) -> Target:
    """Open a file, the shards of a dataset, or a scratch file in a folder, which is written for ``seconds``.

    The stack closes them. Raises UsageError for an empty file or another kind of path, ManifestDamaged,
    NoSpace, OSError.
    """
    if path.is_dir() and not (path / MANIFEST_NAME).exists():
        files = OpenFiles(stack, (_scratch_file(path, stack, seconds),))
        return Target(path, "folder", files, record_bytes or RECORD_BYTES, path)
    if path.is_dir():
        manifest = read_manifest(path)
        shards = [path / name for name in manifest.image_files]
        count = min(len(shards), MAX_FILES)
        chosen = [shards[number * len(shards) // count] for number in range(count)]
        files = OpenFiles.of(chosen, stack)
        if 0 in files.sizes:
            raise UsageError("is empty; prep repair rebuilds it", path=chosen[files.sizes.index(0)])
        mean = max(1, round(manifest.image_bytes / manifest.records))
        remarks = (f"{count} of {len(shards)} shards were read",) if count < len(shards) else ()
        return Target(path, "dataset", files, record_bytes or mean, _place(path), remarks)
    if path.exists() and not path.is_file():
        raise UsageError("is neither a file nor a folder", path=path)
    files = OpenFiles.of([path], stack)
    if files.sizes == (0,):
        raise UsageError("is empty: name a file that has content", path=path)
    return Target(path, "file", files, record_bytes or RECORD_BYTES, _place(path))


def _place(path: Path) -> Path | None:
    """Return a writable folder on the same disk, the path's parent or the path itself; None without one."""
    path = path.resolve()
    for folder in (path.parent, path):
        same = folder.is_dir() and folder.stat().st_dev == path.stat().st_dev
        if same and os.access(folder, os.W_OK | os.X_OK):
            return folder
    return None


LARGEST = 1 << 30
SMALLEST = 4 << 20
FREE_DIVISOR = 4  # the rest of the free space is for other programs
CHUNK_BYTES = 16 << 20
PREFIX = ".prep-bench-disk-"


def noise(size: int) -> memoryview:
    """Return random bytes, which no file system can compress."""
    return memoryview(np.random.default_rng().bytes(size))


def room(folder: Path, wanted: int) -> int:
    """Return ``wanted`` bytes, or a quarter of the folder's free space if that is less."""
    return min(wanted, shutil.disk_usage(folder).free // FREE_DIVISOR)


def write_all(descriptor: int, data: memoryview) -> int:
    """Write all of ``data`` at the file's position; return its length."""
    written = 0
    while written < len(data):
        written += os.write(descriptor, data[written:])
    return written


def _scratch_file(folder: Path, stack: ExitStack, seconds: float) -> int:
    """Write 4 MiB to 1 GiB for ``seconds``, flushed piece by piece; return the descriptor."""
    size = room(folder, LARGEST)
    if size < SMALLEST:
        raise NoSpace(f"has no room for a file of {SMALLEST >> 20} MiB; make room", path=folder)
    written, deadline = 0, time.monotonic() + seconds
    try:
        file = stack.enter_context(tempfile.TemporaryFile(dir=folder, buffering=0))  # noqa: SIM115 - the stack's
        data = noise(min(size, CHUNK_BYTES))
        while written < size and (written < SMALLEST or time.monotonic() < deadline):
            step = SMALLEST if written < SMALLEST else len(data)
            written += write_all(file.fileno(), data[: min(step, size - written)])
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = str(folder)  # not the file's temporary name
        raise
    return file.fileno()


@contextmanager
def temporary_folder(beside: Path) -> Iterator[Path]:
    """Make a folder in ``beside``, and remove it at the end even if signals arrive. Raises OSError."""
    folder = beside / f"{PREFIX}{secrets.token_hex(4)}"
    with ExitStack() as stack:
        # twice, because a signal may interrupt the first call before it holds signals back
        stack.callback(_remove, folder)
        stack.callback(_remove, folder)
        folder.mkdir(mode=0o700)
        yield folder


def _remove(folder: Path) -> None:
    """Remove the folder, and delay SIGINT and SIGTERM, which only the main thread receives, until then."""
    held: list[int] = []
    in_main = threading.current_thread() is threading.main_thread()
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if in_main and callable(signal.getsignal(n))]
    before = {number: signal.signal(number, lambda number, _: held.append(number)) for number in numbers}
    try:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if held:
            signal.raise_signal(held[0])


MAX_SPAN = min(1 << 30, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 8)
MAX_READS = 4096  # in a random pass, so that the check for cold pages is quick

# On some processors a copy to the start of a page is up to a tenth slower, because source and target share
# their low address bits; on others a copy to 16 bytes past it, as from malloc. O_DIRECT needs whole pages.
CACHE_LINE = 64

CAN_ADVISE = hasattr(os, "posix_fadvise")

Pieces = npt.NDArray[np.int64]
"""[N, 2]: file numbers and offsets."""


@dataclass(frozen=True)
class Pattern:
    """Reads of ``block`` bytes by ``depth`` processes, which request pieces ``ahead`` of their reads."""

    block: int
    depth: int = 1
    random: bool = False
    ahead: int = 0

    @classmethod
    def of_records(cls, record_bytes: int, *, depth: int) -> Pattern:
        """Return the pattern of records at random places, rounded up to whole pages."""
        return cls(-(-record_bytes // PAGE) * PAGE, depth, random=True)

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
        block = f"{self.block >> 10} KiB" if self.block >= 1024 else f"{self.block} bytes"
        order = "at random places" if self.random else "forward"
        ahead = f", requested {self.ahead} pieces ahead" if self.ahead else ""
        processes = f" by {self.depth} processes" if self.depth > 1 else ""
        return f"preadv of {block} {order}{processes}{ahead}"


def read(
    files: Sequence[int], pieces: Pieces, pattern: Pattern, *, seconds: float, direct: bool = False
) -> tuple[float, Pieces]:
    """Read the pieces in order for at most ``seconds``; each process reads every ``depth``-th, at least one.

    ``files`` are descriptors, opened with O_DIRECT if ``direct``. Returns the bytes per second until the last
    process ended, and the pieces that were read. Raises OSError, and WorkerDied if a reading process is
    killed or takes START_TIMEOUT_S longer than ``seconds``. Any other exception (Ctrl-C) ends the processes.
    """
    for file in files if CAN_ADVISE else ():
        advice = os.POSIX_FADV_RANDOM if pattern.random else os.POSIX_FADV_SEQUENTIAL
        os.posix_fadvise(file, 0, 0, advice)
    depth, ahead = min(pattern.depth, len(pieces)), 0 if direct or not CAN_ADVISE else pattern.ahead
    order = ORDER.pack(depth, pattern.block, 0 if direct else CACHE_LINE, ahead, seconds)
    opened = np.column_stack((np.array(files, np.int64)[pieces[:, 0]], pieces[:, 1]))
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", str(Path(reader_process.__file__))],
            input=order + opened.tobytes(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=files,
            process_group=0,  # Ctrl-C must reach only this process
            timeout=START_TIMEOUT_S + seconds,
        )
    except subprocess.TimeoutExpired as late:
        raise WorkerDied(
            f"the reading processes took longer than {late.timeout:g} s; check whether the disk hangs"
        ) from late
    if done.returncode or len(done.stdout) != ANSWER.size + depth * REPORT.size:
        raise WorkerDied("a reading process ended early; check whether the system is out of memory")
    (began,) = ANSWER.unpack_from(done.stdout)
    size, ended, passed = 0, began, []
    for number, count, read_bytes, error, at in REPORT.iter_unpack(done.stdout[ANSWER.size :]):
        if error:
            raise OSError(error, os.strerror(error))
        size, ended = size + read_bytes, max(ended, at)
        passed.append(pieces[number::depth][:count])
    return size / max(ended - began, 1e-9), np.concatenate(passed)


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
    first = files.descriptors[0]
    try:
        os.pread(first, 1, 0)
        if not resident(first, [(0, 1)])[0]:
            place = filesystem or "the file system"
            return ColdWay(None, f"{place} has its own cache, which cannot be checked")
        kept = drop([first], np.zeros((1, 2), np.int64), min(files.sizes[0], MAX_SPAN))
        if kept <= COLD:
            return ColdWay(FADVISE)
        why_not = f"{kept:.0%} of the pages stayed in memory"
    except OSError as error:  # some file systems do not support maps
        why_not = f"the system does not say which of its pages are in memory ({error.strerror})"
    if files.open_direct():
        return ColdWay(DIRECT, why_not)
    return ColdWay(None, f"{why_not}, and it cannot be read with O_DIRECT")


def drop(files: Sequence[int], pieces: Pieces, block: int) -> float:
    """Drop the files from the page cache; return the share of the pieces' pages that stayed."""
    for _ in range(TRIES if CAN_ADVISE else 1):
        for file in files:
            forget(file)
        kept = resident_part(files, pieces, block)
        if kept <= COLD:
            break
        time.sleep(PAUSE_S)
    return kept


def forget(descriptor: int) -> None:
    """Ask the kernel to drop an open file's pages; dirty, mapped and in-flight ones stay."""
    with suppress(OSError):  # `resident` reports the pages that cannot be flushed
        os.fsync(descriptor)
    if CAN_ADVISE:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def resident_part(files: Sequence[int], pieces: Pieces, block: int) -> float:
    """Return the share of the pieces' pages in memory; adjacent pieces take one call."""
    found = asked = 0
    for file in np.unique(pieces[:, 0]).tolist():
        begins = np.sort(pieces[pieces[:, 0] == file, 1])
        parts = np.split(begins, np.flatnonzero(np.diff(begins) != block) + 1)
        in_memory, checked = resident(files[file], [(int(p[0]), int(p[-1]) + block) for p in parts])
        found, asked = found + in_memory, asked + checked
    return found / max(1, asked)


def resident(descriptor: int, spans: Iterable[tuple[int, int]] | None = None) -> tuple[int, int]:
    """Return (pages in memory, pages checked) of an open file, by mincore(2).

    ``spans`` are (begin, end) in bytes, by default the whole file. Raises OSError if the file cannot be
    mapped. If this process neither owns the file nor may write it, the kernel reports all pages as in memory.
    """
    size = os.fstat(descriptor).st_size
    if not size:
        return 0, 0
    found = asked = 0
    with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as memory:
        data = np.frombuffer(memory, np.uint8)
        try:
            for begin, end in spans or ((0, size),):
                begin -= begin % mmap.PAGESIZE
                length = min(end, size) - begin
                pages = np.zeros(-(-length // mmap.PAGESIZE), np.uint8)
                address, states = data.ctypes.data + begin, pages.ctypes.data_as(ctypes.c_void_p)
                if _libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(length), states):
                    raise OSError(ctypes.get_errno(), f"mincore: {os.strerror(ctypes.get_errno())}")
                found += int(np.count_nonzero(pages & 1))
                asked += len(pages)
        finally:
            del data  # or the map could not be closed
    return found, asked


def evict(path: Path) -> None:
    with path.open("rb") as file:
        forget(file.fileno())


def resident_share(path: Path) -> float:
    """Return the share of the file's pages in memory; 0 for an empty file."""
    with path.open("rb") as file:
        found, asked = resident(file.fileno())
    return found / max(1, asked)
