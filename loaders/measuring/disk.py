"""The profile of a disk: how fast it feeds training, by cold and warm reads, small files and writes.

Pieces are read with preadv(2) by ``depth`` processes, because sixteen threads that share the GIL read a third
less from memory than sixteen threads of a C program.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import NoSpace, UsageError, WorkerDied
from shardprep.formats.runtime.files import (
    NETWORK_FILESYSTEMS,
    OPEN_FLAGS,
    disk_room,
    filesystem_type,
    name_in_os_errors,
)
from shardprep.formats.runtime.json_record import JsonRecord
from shardprep.formats.runtime.owners import Descriptor
from shardprep.formats.runtime.progress import check_int, check_seconds
from shardprep.formats.runtime.user_paths import user_path
from shardprep.formats.shards.manifest import read_manifest
from shardprep.formats.shards.read import MANIFEST_NAME
from shardprep.loaders.loader.ahead import CHUNK_BYTES

__all__ = [
    "BlockReads",
    "DepthReads",
    "DiskProfile",
    "Measurement",
    "Missing",
    "Reads",
    "SmallFileReads",
    "measure_disk",
]


@dataclass(frozen=True, slots=True)
class Measurement:
    """Bytes per second: ``median`` of ``repetitions`` passes, with the quartiles ``low`` and ``high``.

    ``method`` describes how the bytes were read or written.
    """

    median: float
    low: float
    high: float
    repetitions: int
    method: str

    @classmethod
    def of(cls, rates: Sequence[float], method: str) -> Measurement | None:
        if not rates:
            return None
        low, median, high = np.percentile(rates, (25, 50, 75)).tolist()
        return cls(median, low, high, len(rates), method)


@dataclass(frozen=True, slots=True)
class Reads:
    """Rates of the same bytes read ``cold``, and ``warm`` from memory; None if not measured."""

    cold: Measurement | None
    warm: Measurement | None

    def rate(self, name: str) -> float | None:
        """Return the median rate "cold" or "warm"; None if not measured."""
        measurement: Measurement | None = getattr(self, name)
        return measurement.median if measurement else None


@dataclass(frozen=True, slots=True)
class BlockReads(Reads):
    """Sequential reads in blocks of ``block_bytes``, ``cold`` and ``warm``."""

    block_bytes: int


@dataclass(frozen=True, slots=True)
class DepthReads(Reads):
    """Random reads of ``block_bytes`` each (a record, rounded up to pages), ``queue_depth`` at once."""

    queue_depth: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class SmallFileReads:
    """Reads of ``count`` ``files`` of ``file_bytes`` each, and of one ``shard`` of the same bytes."""

    count: int
    file_bytes: int
    files: Reads
    shard: Reads


@dataclass(frozen=True, slots=True)
class Missing:
    """Why rates of ``cold`` reads, ``small_files`` or ``writing`` are missing; None if they are not."""

    cold: str | None
    small_files: str | None
    writing: str | None


@dataclass(frozen=True)
class DiskProfile(JsonRecord):
    """The profile of a disk. Immutable, picklable, comparable; ``from_json(p.to_json()) == p``.

    ``kind`` of ``path`` is "file", "folder" or "dataset"; ``filesystem`` is the type of its file system.
    ``files`` files of ``bytes`` bytes in total were read. ``record_bytes`` is the mean size of a record, or
    the size used instead. ``seconds`` is the duration of the measurement. ``cold_method`` is "posix_fadvise"
    (pages dropped, confirmed by mincore(2)), "O_DIRECT", or None with the reason in ``missing.cold``.
    ``stream`` is the loader's pattern: forward in large pieces, requested ahead. ``sequential`` has one entry
    per block size, ``random`` one per number of reads at once. ``small_files`` compares many files with one,
    ``writing`` is the rate of writes with fsync; None if not measured, with the reason in ``missing``.
    ``remarks`` are sentences for the reader.
    """

    KIND: ClassVar[str] = "disk profile"
    ADVICE: ClassVar[str] = "measure again with prep bench-disk --save"

    path: str
    kind: str
    filesystem: str
    files: int
    bytes: int
    record_bytes: int
    seconds: float
    cold_method: str | None
    stream: Reads
    sequential: tuple[BlockReads, ...]
    random: tuple[DepthReads, ...]
    small_files: SmallFileReads | None
    writing: Measurement | None
    missing: Missing
    remarks: tuple[str, ...] = ()

    def __repr__(self) -> str:
        rates = [(name, self.stream.rate(name)) for name in ("cold", "warm")]
        texts = ", ".join(f"{rate / 1e6:,.0f} MB/s {name}" for name, rate in rates if rate is not None)
        return f"<DiskProfile of {self.path!r} ({self.filesystem}): {texts or 'no rates'}>"

    @property
    def images_per_second(self) -> dict[str, float | None]:
        """The most images/s that the disk delivers in the loader's pattern, "cold" and "warm"."""
        return {name: _ratio(self.stream.rate(name), self.record_bytes) for name in ("cold", "warm")}

    @property
    def sequential_over_random(self) -> dict[str, float | None]:
        """The rate of the loader's pattern over that of random reads one at a time, "cold" and "warm"."""
        return {name: _ratio(self.stream.rate(name), self.random[0].rate(name)) for name in ("cold", "warm")}

    def to_json(self) -> dict[str, Any]:
        """Return a value of JSON types, with derived values; docs/reference/bench-disk.md lists the keys."""
        derived = ("images_per_second", "sequential_over_random")
        return super().to_json() | {name: getattr(self, name) for name in derived}


def _ratio(rate: float | None, other: float | None) -> float | None:
    return rate / other if rate is not None and other else None


SECONDS = 20.0
RECORD_BYTES = 110_000  # the mean size of an ImageNet JPEG
LARGEST_RECORD = 16 << 20
BLOCKS = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
DEPTHS = (1, 2, 4, 8, 16)
AHEAD = 4  # pieces, as in a loader's read-ahead
MAX_FILES = 128  # far below any limit on open files
ROUNDS = 3  # the intended minimum for a median
MAX_ROUNDS = 25
READING_SHARE = 0.7  # of the time; the rest is for dropping and checking pages

Progress = Callable[[str, float], None]


def measure_disk(
    path: str | os.PathLike[str],
    *,
    seconds: float = SECONDS,
    record_bytes: int | None = None,
    progress: Progress | None = None,
) -> DiskProfile:
    """Measure the disk of a path, without special rights.

    Reads are sequential in blocks of 64 KiB to 4 MiB, in the loader's pattern, and of ``record_bytes`` at
    random places by 1 to 16 processes. Each is cold, which drops these files and no others from the page
    cache, then warm. On a writable disk many small files are compared with one of the same bytes, and writing
    with fsync is timed. The steps are repeated in turn until ``seconds`` are over, each at least once. Places
    and order differ from run to run.

    Nothing is left behind, unless this process is killed while small files are read. Thread-safe.

    Args:
        path: A file, a dataset (its shards are read, in stored order), or another folder (an unnamed file is
            written there for 15% of the time, up to 1 GiB or a quarter of the free space).
        seconds: Total time to measure.
        record_bytes: Size of the random reads; None is the dataset's mean, or 110,000.
        progress: ``progress(title, share)`` is called before each step with its name and the elapsed share
            of the time; it must not raise.

    Returns:
        The profile of the disk.

    Raises:
        UsageError, ManifestDamaged: The path cannot be measured.
        NoSpace, OSError: The disk fails.
    """
    seconds = check_seconds(seconds, "the time to measure")
    if record_bytes is not None:
        record_bytes = check_int(record_bytes, "record_bytes", least=1, most=LARGEST_RECORD)
    path, began = user_path(path), time.monotonic()
    end, why_not = began + seconds, "no folder beside it is writable"

    def report_progress(title: str) -> None:
        if progress:
            progress(title, min(1.0, (time.monotonic() - began) / max(seconds, 1e-9)))

    report_progress("opening")
    with ExitStack() as stack:
        kind, files, mean, remarks = _open_files(path, stack, seconds * SCRATCH_SHARE)
        record, filesystem = record_bytes or min(mean, LARGEST_RECORD), filesystem_type(path)
        place = path if kind == "folder" else _writable_folder(path.resolve())
        mode = find_cold_mode(files, filesystem)
        stream = Reading("the loader's pattern", files, mode, Pattern(CHUNK_BYTES, ahead=AHEAD))
        blocks = [Reading(f"sequential, {block_size(size)}", files, mode, Pattern(size)) for size in BLOCKS]
        depths = [
            Reading(f"random, {depth} at once", files, mode, Pattern.of_records(record, depth=depth))
            for depth in DEPTHS
        ]
        writing = Writing(place or path, None if place else why_not)
        steps: list[Reading | Writing] = [stream, *blocks, *depths, writing]
        small: list[Reading] = []
        each = READING_SHARE * max(0.0, end - time.monotonic()) / (ROUNDS * (2 * len(steps) + 3))
        if place:
            report_progress("small files")
            try:
                folder = stack.enter_context(TemporaryDirectory(prefix=".prep-bench-disk-", dir=place))
                many, one = _small_files(Path(folder), record, stack, each)
                opening, whole = Pattern.of_records(record, folder=folder), Pattern(MIB)
                small = [Reading("small files", many, mode, opening), Reading("one file", one, mode, whole)]
            except OSError as error:
                why_not = error.strerror or str(error)
        steps[-1:-1] = small
        durations = dict.fromkeys(steps, -math.inf)
        for _ in range(MAX_ROUNDS):
            for step in steps:
                now = time.monotonic()
                if durations[step] <= end - now:
                    report_progress(step.title)
                    step.round(each)
                    durations[step] = time.monotonic() - now
        reads = Reads(*stream.rates)
        stayed = "the files stayed in memory: another program is reading them"
        if filesystem in NETWORK_FILESYSTEMS or filesystem.startswith("fuse"):
            text = f"on {filesystem}, cold means not in this machine's memory; the server's memory is unknown"
            remarks = (*remarks, text)
        return DiskProfile(
            path=str(path),
            kind=kind,
            filesystem=filesystem,
            files=len(files.sizes),
            bytes=sum(files.sizes),
            record_bytes=record,
            seconds=time.monotonic() - began,
            cold_method=mode.method if reads.cold else None,
            stream=reads,
            sequential=tuple(BlockReads(*step.rates, step.pattern.block) for step in blocks),
            random=tuple(DepthReads(*step.rates, step.pattern.depth, step.pattern.block) for step in depths),
            small_files=SmallFileReads(len(many.sizes), record, *(Reads(*step.rates) for step in small))
            if small
            else None,
            writing=Measurement.of(
                writing.rates, "write of 1 MiB blocks to a new file, then fsync, both timed"
            ),
            missing=Missing(
                None if reads.cold else mode.reason or stayed, None if small else why_not, writing.missing
            ),
            remarks=remarks,
        )


def _open_files(path: Path, stack: ExitStack, seconds: float) -> tuple[str, OpenFiles, int, tuple[str, ...]]:
    """Open a file, the shards of a dataset, or a scratch file in a folder, which is written for ``seconds``.

    Returns the kind, the files, the mean size of a record, and remarks.
    """
    kind, mean, paths = "file", RECORD_BYTES, [path]
    remarks: tuple[str, ...] = ()
    if path.is_dir() and not (path / MANIFEST_NAME).exists():
        return "folder", OpenFiles([_scratch_file(path, stack, seconds)]), mean, ()
    if path.is_dir():
        kind, manifest = "dataset", read_manifest(path)
        mean = max(1, round((manifest.image_bytes or manifest.size) / manifest.records))
        names = manifest.image_files if manifest.image_bytes else [file.name for file in manifest.files]
        count = min(len(names), MAX_FILES)
        paths = [path / names[number * len(names) // count] for number in range(count)]
        remarks = (f"{count} of {len(names)} shards were read",) if count < len(names) else ()
    elif not path.is_file():
        raise UsageError("does not exist, or is neither a file nor a folder; give another path", path=path)
    files = OpenFiles.of(paths, stack)
    if 0 in files.sizes:
        todo = "prep repair rebuilds it" if kind == "dataset" else "name a file that has content"
        raise UsageError(f"is empty; {todo}", path=paths[files.sizes.index(0)])
    return kind, files, mean, remarks


def _writable_folder(path: Path) -> Path | None:
    """Return a writable folder on the same disk, the path's parent or the path itself; None without one."""
    for folder in (path.parent, path):
        same = folder.is_dir() and folder.stat().st_dev == path.stat().st_dev
        if same and os.access(folder, os.W_OK | os.X_OK):
            return folder
    return None


WARM = 0.99  # the least share of pages in memory that counts as warm
WARM_BYTES = 64 << 20  # fewer bytes are read repeatedly, because they are too short to time


class Reading:
    """The repeated measurement of one pattern of reads, cold and warm. Not thread-safe."""

    def __init__(self, title: str, files: OpenFiles, mode: ColdMode, pattern: Pattern) -> None:
        self.title, self.pattern = title, pattern
        self._files, self._method = files, mode.method
        self._cold: list[float] = []
        self._warm: list[float] = []

    def round(self, seconds: float) -> None:
        """Measure a cold pass of at most ``seconds``, and a warm one of at most half of that."""
        files, block, is_direct = self._files, self.pattern.block, self._method == DIRECT
        pieces = self.pattern.pieces(files)
        is_cold = self._method and (is_direct or drop_pages(files.descriptors, pieces, block) <= COLD)
        rate, pieces_read = read(files.descriptors, pieces, self.pattern, seconds=seconds, direct=is_direct)
        if is_cold:
            self._cold.append(rate)
        if is_direct:
            _, pieces_read = read(files.descriptors, pieces, self.pattern, seconds=seconds)
        is_warm = True  # assumed for files that cannot be mapped: they were just read
        with suppress(OSError):
            is_warm = memory_share(files.descriptors, pieces_read, block) >= WARM
        if is_warm:
            again = np.tile(pieces_read, (max(1, WARM_BYTES // (len(pieces_read) * block)), 1))
            self._warm.append(read(files.descriptors, again, self.pattern, seconds=seconds / 2)[0])
        if not self.pattern.random:
            files.passed = (files.passed + len(pieces_read) * block / sum(files.sizes)) % 1.0

    @property
    def rates(self) -> tuple[Measurement | None, Measurement | None]:
        dropped = "pages dropped by posix_fadvise, checked by mincore"
        cold = f"{self.pattern}, {DIRECT if self._method == DIRECT else dropped}"
        return Measurement.of(self._cold, cold), Measurement.of(self._warm, f"{self.pattern}, from memory")


MIB = 1 << 20
SCRATCH_SHARE = 0.15  # of the time, for writing the scratch file in a folder
MIN_SCRATCH, MAX_SCRATCH = 4 * MIB, 1 << 30
MIN_SMALL, MAX_SMALL = 16, 256  # files
MAX_SMALL_BYTES = 64 * MIB
FIRST_WRITTEN, MAX_WRITTEN = 4 * MIB, 256 * MIB
FREE_DIVISOR = 4  # the rest of the free space is for other programs


class Writing:
    """The repeated measurement of writing to a new file, fsync included; or why it is ``missing``.

    The last round's rate determines the amount: the page cache would accept bytes that take the disk minutes.
    """

    title = "write and fsync"

    def __init__(self, place: Path, missing: str | None) -> None:
        self.missing = missing
        self.rates: list[float] = []
        self._place = place

    def round(self, seconds: float) -> None:
        if self.missing:
            return
        wanted = int(self.rates[-1] * seconds) if self.rates else FIRST_WRITTEN
        blocks = max(1, _limit_by_free_space(self._place, min(wanted, MAX_WRITTEN)) // MIB)
        try:
            with ExitStack() as stack:
                file, data = _unnamed_file(self._place, stack), _random_bytes(MIB)
                began = time.perf_counter()
                _write(file, data, blocks)
                self.rates.append(blocks * MIB / (time.perf_counter() - began))
        except OSError as error:
            self.missing, self.rates = error.strerror or str(error), []


def _small_files(folder: Path, size: int, stack: ExitStack, seconds: float) -> tuple[OpenFiles, OpenFiles]:
    """Write files of this size, for ``seconds`` if there are enough by then, and one with the same bytes.

    Each is flushed, so that its pages can be dropped and the time holds.
    """
    data, end, paths = _random_bytes(size), time.monotonic() + seconds, []
    for number in range(max(1, min(MAX_SMALL, _limit_by_free_space(folder, MAX_SMALL_BYTES) // size // 2))):
        if number >= MIN_SMALL and time.monotonic() > end:
            break
        paths.append(folder / str(number))
        with paths[-1].open("xb", buffering=0) as file:
            _write(file.fileno(), data)
    with (folder / "one").open("xb", buffering=0) as file:
        _write(file.fileno(), data, len(paths))
    return OpenFiles.of(paths, stack), OpenFiles.of([folder / "one"], stack)


def _scratch_file(folder: Path, stack: ExitStack, seconds: float) -> int:
    """Write 4 MiB to 1 GiB for ``seconds``, flushed piece by piece; return the descriptor."""
    size = _limit_by_free_space(folder, MAX_SCRATCH)
    if size < MIN_SCRATCH:
        raise NoSpace(f"has no room for a file of {MIN_SCRATCH >> 20} MiB; make room", path=folder)
    file, data, end = _unnamed_file(folder, stack), _random_bytes(MIN_SCRATCH), time.monotonic() + seconds
    with name_in_os_errors(folder):
        _write(file, data)
        while time.monotonic() < end and (left := size - os.fstat(file).st_size) >= MIN_SCRATCH:
            _write(file, data, min(4, left // MIN_SCRATCH))
    return file


def _unnamed_file(folder: Path, stack: ExitStack) -> int:
    """Make a file that has no name, and vanishes with its descriptor, which the stack closes."""
    try:
        return stack.enter_context(TemporaryFile(dir=folder, buffering=0)).fileno()
    except OSError as error:
        error.filename = str(folder)  # not a temporary name
        raise


def _random_bytes(size: int) -> memoryview:
    """Return random bytes, which no file system can compress."""
    return memoryview(np.random.default_rng().bytes(size))


def _limit_by_free_space(folder: Path, wanted: int) -> int:
    """Return ``wanted`` bytes, or a quarter of the folder's free space if that is less."""
    return min(wanted, disk_room(folder)[1] // FREE_DIVISOR)


def _write(descriptor: int, data: memoryview, times: int = 1) -> None:
    for _ in range(times):
        left = data
        while left:
            left = left[os.write(descriptor, left) :]
    os.fsync(descriptor)


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
        files = (Descriptor(os.open(path, OPEN_FLAGS)) for path in paths)  # does not wait for a fifo's writer
        return cls(stack.enter_context(closing(file)).fileno() for file in files)


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
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM if pattern.random else os.POSIX_FADV_SEQUENTIAL)
    depth, ahead = min(pattern.depth, len(pieces)), 0 if direct else pattern.ahead
    flags = DIRECT_FLAGS if direct else OPEN_FLAGS if pattern.folder else 0
    options = (pattern.folder, seconds, depth, pattern.block, 0 if direct else CACHE_LINE, ahead, flags)
    numbers = np.arange(len(files)) if pattern.folder else np.array(files, np.int64)
    process = subprocess.run(
        [sys.executable, "-I", "-S", str(READER), *map(str, options)],
        input=np.column_stack((numbers[pieces[:, 0]], pieces[:, 1])).tobytes(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=files,
    )
    reports = np.array([line.split() for line in process.stdout.splitlines()], float).reshape(-1, 6)
    if process.returncode or len(reports) != depth:
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


class ColdMode(NamedTuple):
    """The method of cold reads: "posix_fadvise", "O_DIRECT", or None with the reason."""

    method: str | None
    reason: str | None = None


def find_cold_mode(files: OpenFiles, filesystem: str) -> ColdMode:
    """Return the first method that works: dropped pages, confirmed by mincore(2), or O_DIRECT."""
    if filesystem in MEMORY_FILESYSTEMS:
        return ColdMode(None, f"{filesystem} keeps its files in memory")
    first, start = files.descriptors[:1], np.zeros((1, 2), np.int64)
    why_not = "it cannot be mapped"
    with suppress(OSError):
        os.pread(first[0], 1, 0)
        if not memory_share(first, start, 1):
            return ColdMode(None, f"{filesystem or 'the system'} has its own cache, which cannot be checked")
        if drop_pages(first, start, min(files.sizes[0], MAX_SPAN)) <= COLD:
            return ColdMode(FADVISE)
        why_not = "its pages stayed in memory"
    with suppress(OSError):
        for file in files.descriptors:
            os.close(os.open(f"/dev/fd/{file}", DIRECT_FLAGS))
        return ColdMode(DIRECT, why_not)
    return ColdMode(None, f"{why_not}, and it cannot be read with O_DIRECT")


def drop_pages(files: Sequence[int], pieces: Pieces, block: int) -> float:
    """Drop the files from the page cache; return the share of the pieces' pages that stayed."""
    for _ in range(TRIES):
        for file in files:
            drop_file(file)
        resident = memory_share(files, pieces, block)
        if resident <= COLD:
            break
        time.sleep(PAUSE_S)
    return resident


def drop_file(descriptor: int) -> None:
    """Ask the kernel to drop an open file's pages; dirty, mapped and in-flight ones stay."""
    with suppress(OSError):  # `memory_share` reports the pages that cannot be flushed
        os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def memory_share(files: Sequence[int], pieces: Pieces, block: int) -> float:
    """Return the share of the pieces' pages that are in memory, by mincore(2).

    Raises OSError if a file cannot be mapped. If this process neither owns a file nor may write it, the
    kernel reports all its pages as in memory.
    """
    resident = total = 0
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
                resident, total = resident + int(np.count_nonzero(states[:pages] & 1)), total + pages
    return resident / max(1, total)


def resident_share(path: Path) -> float:
    """Return the share of the file's pages in memory; 0 for an empty file."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        return memory_share([file.fileno()], np.zeros((1, 2), np.int64), size) if size else 0.0
