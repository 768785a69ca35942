"""The profile of a disk: how fast it feeds training, by cold and warm reads, small files and writes."""

from __future__ import annotations

import json
import math
import os
import random
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardprep.formats.errors import DataError, UnknownVersion, UsageError
from shardprep.formats.runtime.files import NETWORK_FILESYSTEMS, naming_file, save_bytes, user_path
from shardprep.formats.runtime.json_record import built_fields
from shardprep.formats.sources.listing import read_small_file
from shardprep.loaders.loader.ahead import CHUNK_BYTES
from shardprep.loaders.measuring.disk_files import (
    CACHE_LINE,
    COLD,
    DIRECT,
    FADVISE,
    PAGE,
    ColdWay,
    OpenFiles,
    Pattern,
    cold_way,
    drop,
    evict,
    noise,
    open_target,
    read,
    resident_part,
    resident_share,
    room,
    temporary_folder,
    write_all,
)
from shardprep.loaders.measuring.reader_process import buffer

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

FORMAT = "shardprep disk profile"
VERSION = 1

LARGEST = 1 << 20
ADVICE = "measure again with prep bench-disk --save"


@dataclass(frozen=True, slots=True)
class Measurement:
    """Bytes per second: ``median`` of ``repetitions`` passes, with the quartiles ``low`` and ``high``.

    ``method`` describes how the bytes were read or written. Raises ValueError for rates that are not finite,
    negative or out of order.
    """

    median: float
    low: float
    high: float
    repetitions: int
    method: str

    def __post_init__(self) -> None:
        rates = (self.low, self.median, self.high)
        if not (0 <= self.low <= self.median <= self.high and all(map(math.isfinite, rates))):
            raise ValueError(f"rates of {rates}")
        if self.repetitions < 1:
            raise ValueError(f"{self.repetitions} repetitions")

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
        found: Measurement | None = getattr(self, name)
        return found.median if found else None


@dataclass(frozen=True, slots=True)
class BlockReads(Reads):
    """Sequential reads in blocks of ``block_bytes``, ``cold`` and ``warm``."""

    block_bytes: int

    @property
    def block_name(self) -> str:
        """The size of a block, such as "64 KiB" or "4 MiB"."""
        mebibytes, rest = divmod(self.block_bytes, 1 << 20)
        return f"{self.block_bytes >> 10} KiB" if rest else f"{mebibytes} MiB"


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
class DiskProfile:
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
        known = ", ".join(f"{rate / 1e6:,.0f} MB/s {name}" for name, rate in rates if rate is not None)
        return f"<DiskProfile of {self.path!r} ({self.filesystem}): {known or 'no rates'}>"

    @property
    def images_per_second(self) -> dict[str, float | None]:
        """The most images/s that the disk feeds in the loader's pattern, "cold" and "warm"."""
        return {name: _over(self.stream.rate(name), self.record_bytes) for name in ("cold", "warm")}

    @property
    def sequential_over_random(self) -> dict[str, float | None]:
        """The rate of the loader's pattern over that of random reads one at a time, "cold" and "warm"."""
        return {name: _over(self.stream.rate(name), self.random[0].rate(name)) for name in ("cold", "warm")}

    def to_json(self) -> dict[str, Any]:
        """Return a value of JSON types, with derived values; docs/reference/bench-disk.md lists the keys."""
        values: dict[str, Any] = {"format": FORMAT, "version": VERSION, **asdict(self)}
        for name in ("sequential", "random", "remarks"):
            values[name] = list(values[name])
        for name in ("images_per_second", "sequential_over_random"):
            values[name] = getattr(self, name)
        return values

    @classmethod
    def from_json(cls, value: Any) -> DiskProfile:
        """Return the profile with exactly this JSON. Raises DataError for other values, UnknownVersion."""
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise DataError(f"is not a disk profile; {ADVICE}")
        if value.get("version") != VERSION:
            found = value.get("version")
            raise UnknownVersion(f"profile version {found}; this release knows {VERSION}; {ADVICE}")
        try:
            profile = cls(**built_fields(cls, value))
            same = json.dumps(profile.to_json(), sort_keys=True) == json.dumps(value, sort_keys=True)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError) as error:
            why = f"{type(error).__name__}: {error}"
            raise DataError(f"is a damaged disk profile ({why}); {ADVICE}") from error
        if not same:
            raise DataError(f"is a damaged disk profile: its parts are inconsistent; {ADVICE}")
        return profile

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile to a file, atomically; an existing file is replaced. Raises OSError."""
        data = json.dumps(self.to_json(), indent=2) + "\n"
        save_bytes(user_path(path), data.encode("ascii"), mode=0o644)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> DiskProfile:
        """Read a profile from a file. Raises DataError if it holds none, UnknownVersion, OSError."""
        path = user_path(path)
        try:
            value = json.loads(read_small_file(path, LARGEST))
        except (ValueError, RecursionError) as error:
            raise DataError(f"is not a disk profile: it is not JSON; {ADVICE}", path=path) from error
        with naming_file(path):
            return cls.from_json(value)


def _over(rate: float | None, other: float | None) -> float | None:
    return rate / other if rate is not None and other else None


SECONDS = 20.0
SCRATCH_SHARE = 0.15  # of the time, for writing the scratch file in a folder
BLOCKS = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
DEPTHS = (1, 2, 4, 8, 16)
AHEAD = 4  # pieces, as in a loader's read-ahead
LARGEST_RECORD = 16 << 20

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

    Nothing is left behind, except that SIGKILL, or a signal that Python does not handle, may leave a folder
    ``.prep-bench-disk-*``. Thread-safe.

    Args:
        path: A file, a dataset (its shards are read, in stored order), or another folder (an unnamed file is
            written there for 15 % of the time, up to 1 GiB or a quarter of the free space).
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
    if seconds < 0:
        raise UsageError(f"cannot measure for {seconds:g} seconds")
    if record_bytes is not None and not 1 <= record_bytes <= LARGEST_RECORD:
        raise UsageError(f"records of {record_bytes} bytes: give 1 to {LARGEST_RECORD}")
    began, report = time.monotonic(), progress or (lambda title, share: None)
    report("opening", 0.0)
    with ExitStack() as stack:
        scratch = seconds * SCRATCH_SHARE
        target = open_target(user_path(path), stack, seconds=scratch, record_bytes=record_bytes)
        files, sizes, record = target.files, target.files.sizes, target.record_bytes
        way = cold_way(files, target.filesystem)
        stream = ColdAndWarm(files, way, Pattern(CHUNK_BYTES, ahead=AHEAD), "the loader's pattern")
        blocks = [ColdAndWarm(files, way, Pattern(size), f"sequential, {size >> 10} KiB") for size in BLOCKS]
        depths = [
            ColdAndWarm(files, way, Pattern.of_records(record, depth=depth), f"random, {depth} at once")
            for depth in DEPTHS
        ]
        small_files = SmallFiles(target.place or target.path, record, way, stack)
        writing = WriteMeasurement(target.place or target.path)
        if target.place is None:
            small_files.missing = writing.missing = "no folder beside it is writable"
        run([stream, *blocks, *depths, small_files, writing], began, seconds, report)
        reads, remarks = Reads(*stream.rates), target.remarks
        if (kind := target.filesystem) in NETWORK_FILESYSTEMS or kind.startswith("fuse"):
            text = f"on {kind}, cold means not in this machine's memory; the server's memory is unknown"
            remarks = (*remarks, text)
        return DiskProfile(
            path=str(target.path),
            kind=target.kind,
            filesystem=target.filesystem,
            files=len(sizes),
            bytes=sum(sizes),
            record_bytes=record,
            seconds=time.monotonic() - began,
            cold_method=way.method if reads.cold else None,
            stream=reads,
            sequential=tuple(BlockReads(*step.rates, step.pattern.block) for step in blocks),
            random=tuple(DepthReads(*step.rates, step.pattern.depth, step.pattern.block) for step in depths),
            small_files=small_files.reads,
            writing=writing.rate,
            missing=Missing(
                None
                if reads.cold
                else way.reason or "the files stayed in memory: another program is reading them",
                small_files.missing,
                writing.missing,
            ),
            remarks=remarks,
        )


ROUNDS = 3  # the intended minimum for a median
MAX_ROUNDS = 25
READING_SHARE = 0.7  # of the time; the rest is for dropping and checking pages


def run(steps: Sequence[Step], began: float, seconds: float, progress: Progress) -> None:
    """Run every step once, then again while its last duration fits into the remaining time."""
    end = began + seconds
    each = READING_SHARE * max(0.0, end - time.monotonic()) / (ROUNDS * sum(step.weight for step in steps))
    took = dict.fromkeys(steps, -math.inf)
    for _ in range(MAX_ROUNDS):
        for step in steps:
            now = time.monotonic()
            if step.missing or took[step] > end - now:
                continue
            progress(step.title, min(1.0, (now - began) / max(seconds, 1e-9)))
            try:
                step.round(each)
            except OSError as error:
                if not step.writes:
                    raise
                step.missing = f"could not be measured: {error.strerror or error}"
            took[step] = time.monotonic() - now


class Step(ABC):
    """A step of the measurement, which is repeated every round, and the rates of its passes so far.

    ``title`` is its name in the progress bar; a round takes ``weight`` times the given seconds. ``missing``
    is why a step that ``writes`` has no rates; None while it may have some.
    """

    title: str
    weight: int
    writes = False
    missing: str | None = None

    def __init__(self, how: str, way: ColdWay) -> None:
        self._how = how
        self._way = way
        self._cold: list[float] = []
        self._warm: list[float] = []

    @abstractmethod
    def round(self, seconds: float) -> None:
        """Measure once, for about ``seconds``. Raises OSError."""

    @property
    def rates(self) -> tuple[Measurement | None, Measurement | None]:
        direct, dropped = ", O_DIRECT", ", pages dropped by posix_fadvise, checked by mincore"
        cold = self._how + (direct if self._way.method == DIRECT else dropped)
        return Measurement.of(self._cold, cold), Measurement.of(self._warm, f"{self._how}, from memory")


WARM = 0.99  # the least share of pages in memory that counts as warm
WARM_BYTES = 64 << 20  # fewer bytes are read repeatedly, because they are too short to time


class ColdAndWarm(Step):
    """The step for one pattern of reads, cold and warm. Not thread-safe."""

    weight = 2

    def __init__(self, files: OpenFiles, way: ColdWay, pattern: Pattern, title: str = "") -> None:
        super().__init__(str(pattern), way)
        self.title = title
        self.pattern = pattern
        self._files = files

    def round(self, seconds: float) -> None:
        """Measure a cold pass of at most ``seconds``, and a warm one of at most half of that."""
        files, block, is_direct = self._files, self.pattern.block, self._way.method == DIRECT
        pieces = self.pattern.pieces(files)
        is_cold = self._way.method and (is_direct or drop(files.descriptors, pieces, block) <= COLD)
        descriptors = files.direct if is_direct else files.descriptors
        rate, done = read(descriptors, pieces, self.pattern, seconds=seconds, direct=is_direct)
        if is_cold:
            self._cold.append(rate)
        if is_direct:
            _, done = read(files.descriptors, pieces, self.pattern, seconds=seconds)
        is_warm = True  # assumed for files that cannot be mapped: they were just read
        with suppress(OSError):
            is_warm = resident_part(files.descriptors, done, block) >= WARM
        if is_warm:
            again = np.tile(done, (max(1, WARM_BYTES // (len(done) * block)), 1))
            self._warm.append(read(files.descriptors, again, self.pattern, seconds=seconds / 2)[0])
        if not self.pattern.random:
            files.passed = (files.passed + len(done) * block / sum(files.sizes)) % 1.0


MAX_COUNT = 500
MIN_COUNT = 16
MAX_BYTES = 64 << 20
SHARD_BLOCK = 1 << 20


class SmallFiles(Step):
    """The step for small files, which the first round makes and the ``stack`` removes.

    Each round reads the files and the shard, cold and warm, for at most its seconds each. Not thread-safe.
    """

    title = "small files"
    weight = 4
    writes = True

    def __init__(self, place: Path, record_bytes: int, way: ColdWay, stack: ExitStack) -> None:
        super().__init__("open, preadv and close of each in random order", way)
        self._place = place
        self._size = record_bytes
        self._stack = stack
        self._paths: list[Path] = []
        self._shard: ColdAndWarm | None = None
        offset = 0 if way.method == DIRECT else CACHE_LINE
        self._buffer = buffer(-(-record_bytes // PAGE) * PAGE, offset)

    def round(self, seconds: float) -> None:
        if self._shard is None:
            self._shard = self._made(seconds)
        is_direct = self._way.method == DIRECT
        for path in self._paths if self._way.method == FADVISE else ():
            evict(path)
        if is_direct or (self._way.method and max(map(resident_share, self._paths)) <= COLD):
            self._cold.append(self._read_all(seconds, direct=is_direct))
        self._read_all(seconds, direct=False)
        self._warm.append(self._read_all(seconds, direct=False))
        self._shard.round(seconds)

    def _made(self, seconds: float) -> ColdAndWarm:
        """Make the files, each flushed so that its pages can be dropped and the deadline holds."""
        with ExitStack() as made:  # removes them at once if the disk is full
            folder = made.enter_context(temporary_folder(self._place))
            data, deadline = noise(self._size), time.monotonic() + seconds
            count = max(1, min(MAX_COUNT, room(self._place, MAX_BYTES) // self._size // 2))
            for number in range(count):
                if number >= MIN_COUNT and time.monotonic() > deadline:
                    break
                self._paths.append(folder / f"{number:03d}.jpg")
                _write(self._paths[-1], data, 1)
            _write(folder / "shard", data, len(self._paths))
            self._stack.push(made.pop_all())
        files = OpenFiles.of([folder / "shard"], self._stack)
        if self._way.method == DIRECT:
            files.open_direct()
        return ColdAndWarm(files, self._way, Pattern(SHARD_BLOCK))

    def _read_all(self, seconds: float, *, direct: bool) -> float:
        """Read the files, as many as there is time for; return the bytes per second."""
        flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        order = random.sample(self._paths, len(self._paths))
        size, began = 0, time.perf_counter()
        for path in order:
            descriptor = os.open(path, flags)
            try:
                size += os.preadv(descriptor, [self._buffer], 0)
            finally:
                os.close(descriptor)
            if (taken := time.perf_counter() - began) >= seconds:
                break
        return size / taken

    @property
    def reads(self) -> SmallFileReads | None:
        if self.missing or self._shard is None:
            return None
        return SmallFileReads(len(self._paths), self._size, Reads(*self.rates), Reads(*self._shard.rates))


def _write(path: Path, data: memoryview, times: int) -> None:
    with path.open("xb", buffering=0) as file:
        for _ in range(times):
            write_all(file.fileno(), data)
        os.fsync(file.fileno())


BLOCK = 1 << 20
FIRST_BYTES = 4 << 20
MAX_WRITTEN_BYTES = 256 << 20


class WriteMeasurement(Step):
    """The step for writing, flushing included.

    The last round's rate determines the amount: the page cache would accept bytes that take the disk minutes.
    """

    title = "write and fsync"
    weight = 1
    writes = True

    def __init__(self, place: Path) -> None:
        super().__init__("write of 1 MiB blocks to a new file, then fsync, both timed", ColdWay(None))
        self._place = place
        self._data = noise(BLOCK)
        self._rates: list[float] = []

    def round(self, seconds: float) -> None:
        wanted = int(self._rates[-1] * seconds) if self._rates else FIRST_BYTES
        blocks = max(1, room(self._place, min(wanted, MAX_WRITTEN_BYTES)) // BLOCK)
        with tempfile.TemporaryFile(dir=self._place, buffering=0) as file:
            began = time.perf_counter()
            for _ in range(blocks):
                write_all(file.fileno(), self._data)
            os.fsync(file.fileno())
            self._rates.append(blocks * BLOCK / (time.perf_counter() - began))

    @property
    def rate(self) -> Measurement | None:
        return None if self.missing else Measurement.of(self._rates, self._how)
