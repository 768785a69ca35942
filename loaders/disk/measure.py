"""How fast a disk is, to those who want to train from it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ...formats.errors import UsageError
from ..read_ahead import CHUNK
from .cold import ColdWay, cold_way, server_remarks
from .cold_and_warm import ColdAndWarm
from .plans import Cursor, Forward, Scattered
from .profile import BlockReads, DepthReads, DiskProfile, Missing, Reads
from .schedule import Clock, Progress, Step, run
from .small_files import SmallFiles
from .target import Target, open_target
from .writing import Writing

SECONDS = 20.0
FILL = 0.15  # the share of the time in which a folder's file is written
BLOCKS = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
DEPTHS = (1, 2, 4, 8, 16)
AHEAD = 4  # pieces, as many as the loader has on their way
LARGEST_RECORD = 16 << 20


@dataclass(frozen=True, eq=False)
class ReadStep:
    """A pattern of reading, cold and warm."""

    title: str
    rates: ColdAndWarm
    weight: int = 2

    def round(self, seconds: float) -> None:
        self.rates.round(seconds)


def measure_disk(
    path: str | os.PathLike[str],
    *,
    seconds: float = SECONDS,
    record_bytes: int | None = None,
    progress: Progress | None = None,
) -> DiskProfile:
    """Measure the disk that holds a path, without special rights.

    ``path`` is a file, a dataset (its shards are read, in stored order), or another folder (a file without
    a name is written there: for 15 % of the time, up to 1 GiB or a quarter of the free space). Reads are
    sequential in blocks of 64 KiB to 4 MiB, in the loader's pattern, and of ``record_bytes`` (by default
    the dataset's mean, or 110,000) at random places by 1 to 16 processes; cold, which empties the page cache
    of these files and no others, and warm. Where the disk may be written, many small files are compared
    with one of the same bytes, and writing with fsync is timed. The steps take turns until ``seconds`` are
    over; each is taken at least once. Places and order differ from run to run.

    Nothing is left behind; only SIGKILL, or a signal that Python does not handle, may leave a folder
    ``.prep-bench-disk-*``. Thread-safe. Raises UsageError, ManifestDamaged, NoSpace, OSError.
    """
    if seconds < 0:
        raise UsageError(f"cannot measure for {seconds:g} seconds")
    if record_bytes is not None and not 1 <= record_bytes <= LARGEST_RECORD:
        raise UsageError(f"records of {record_bytes} bytes: give 1 to {LARGEST_RECORD}")
    clock, tell = Clock(seconds), progress or _nothing
    tell("opening", 0.0)
    with open_target(Path(path), seconds=seconds * FILL, record_bytes=record_bytes) as target:
        way = cold_way(target.files, target.filesystem)
        with SmallFiles(target.place, target.record_bytes, way) as small_files:
            return _measured(target, way, small_files, clock, tell)


def _measured(
    target: Target, way: ColdWay, small_files: SmallFiles, clock: Clock, tell: Progress
) -> DiskProfile:
    files, sizes, cursor, writing = target.files, target.files.sizes, Cursor(), Writing(target.place)
    stream = ColdAndWarm(files, way, Forward(sizes, CHUNK, cursor, ahead=AHEAD))
    blocks = {size: ColdAndWarm(files, way, Forward(sizes, size, cursor)) for size in BLOCKS}
    plans = {depth: Scattered(sizes, target.record_bytes, depth=depth) for depth in DEPTHS}
    depths = {depth: ColdAndWarm(files, way, plans[depth]) for depth in DEPTHS}
    steps: list[Step] = [ReadStep("the loader's pattern", stream)]
    steps += [ReadStep(f"sequential, {size >> 10} KiB", rates) for size, rates in blocks.items()]
    steps += [ReadStep(f"random, {depth} at once", rates) for depth, rates in depths.items()]
    run([*steps, small_files, writing], clock, tell)
    reads = stream.reads
    return DiskProfile(
        path=str(target.path),
        kind=target.kind,
        filesystem=target.filesystem,
        files=len(sizes),
        bytes=sum(sizes),
        record_bytes=target.record_bytes,
        seconds=clock.taken,
        cold_method=way.method if reads.cold else None,
        stream=reads,
        sequential=tuple(BlockReads(r.cold, r.warm, size) for size, r in _of(blocks)),
        random=tuple(DepthReads(r.cold, r.warm, depth, plans[depth].block) for depth, r in _of(depths)),
        small_files=small_files.reads,
        writing=writing.rate,
        missing=Missing(None if reads.cold else way.reason or KEPT, small_files.missing, writing.missing),
        remarks=(*target.remarks, *server_remarks(target.filesystem)),
    )


KEPT = "the files stayed in memory: another program is reading them"


def _of(rates: dict[int, ColdAndWarm]) -> list[tuple[int, Reads]]:
    return [(key, each.reads) for key, each in rates.items()]


def _nothing(title: str, share: float) -> None:
    """For who wants no progress."""
