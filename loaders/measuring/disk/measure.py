"""Measuring how fast a disk is for training."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from shardprep.formats.errors import UsageError
from shardprep.formats.system.user_path import user_path
from shardprep.loaders.loader.shards_ahead.read_ahead import CHUNK_BYTES

from .cold_and_warm import ColdAndWarm
from .page_cache import ColdWay, cold_way, server_remarks
from .profile import BlockReads, DepthReads, DiskProfile, Missing, Reads
from .read_plans import Cursor, Forward, Scattered
from .small_files import SmallFiles
from .target import Target, open_target
from .writing import Writing

ROUNDS = 3  # the intended minimum for a median


MAX_ROUNDS = 25


READING_SHARE = 0.7  # of the time; the rest is for dropping and checking pages


Progress = Callable[[str, float], None]
"""Function of the step being measured and the share of the time that is over, 0 to 1. Must not raise."""


SECONDS = 20.0
SCRATCH_SHARE = 0.15  # of the time, for writing the scratch file in a folder
BLOCKS = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
DEPTHS = (1, 2, 4, 8, 16)
AHEAD = 4  # pieces, as many as a loader's read-ahead has pending
LARGEST_RECORD = 16 << 20
STILL_CACHED = "the files stayed in memory: another program is reading them"


class Stage(Protocol):
    """A step of a measurement, done once per round."""

    @property
    def title(self) -> str:
        """The step's name in the progress bar."""

    @property
    def weight(self) -> int:
        """How many times the given seconds a round takes."""

    def round(self, seconds: float) -> None:
        """Measure once, for about ``seconds``."""


class Clock:
    """The total time of a measurement."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._began = time.monotonic()

    @property
    def taken(self) -> float:
        return time.monotonic() - self._began

    @property
    def left(self) -> float:
        return self._seconds - self.taken

    @property
    def share(self) -> float:
        return min(1.0, self.taken / max(self._seconds, 1e-9))


def run(steps: Sequence[Stage], clock: Clock, progress: Progress) -> None:
    """Run every step once, then again while there is as much time left as it took before."""
    seconds = READING_SHARE * max(0.0, clock.left) / (ROUNDS * sum(step.weight for step in steps))
    took: dict[Stage, float] = {}
    for number in range(MAX_ROUNDS):
        fitting = [step for step in steps if not number or took[step] < clock.left]
        for step in fitting:
            if number and took[step] > clock.left:
                continue
            progress(step.title, clock.share)
            began = clock.taken
            step.round(seconds)
            took[step] = clock.taken - began
        if not fitting:
            return


@dataclass(frozen=True, eq=False)
class ReadStep:
    """The step that measures one pattern of reads, cold and warm."""

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
    """Measure the disk of a path, without special rights.

    ``path`` is a file, a dataset (its shards are read, in stored order), or another folder (a file without a
    name is written there: for 15 % of the time, up to 1 GiB or a quarter of the free space). Reads are
    sequential in blocks of 64 KiB to 4 MiB, in the loader's pattern, and of ``record_bytes`` (default: the
    dataset's mean, or 110,000) at random places by 1 to 16 processes; cold, which drops these files, and no
    others, from the page cache, and warm. If the disk is writable, many small files are compared with one of
    the same bytes, and writing with fsync is timed. The steps are repeated in turn until ``seconds`` are
    over; each is done at least once. Places and order differ from run to run. ``progress(title, share)`` is
    called before each step with its name and the share of the time that is over; it must not raise.

    Nothing is left behind; only SIGKILL, or a signal that Python does not handle, may leave a folder
    ``.prep-bench-disk-*``. Thread-safe. Raises UsageError, ManifestDamaged, NoSpace, OSError.
    """
    if seconds < 0:
        raise UsageError(f"cannot measure for {seconds:g} seconds")
    if record_bytes is not None and not 1 <= record_bytes <= LARGEST_RECORD:
        raise UsageError(f"records of {record_bytes} bytes: give 1 to {LARGEST_RECORD}")
    clock, report = Clock(seconds), progress or _no_progress
    report("opening", 0.0)
    with open_target(user_path(path), seconds=seconds * SCRATCH_SHARE, record_bytes=record_bytes) as target:
        way = cold_way(target.files, target.filesystem)
        with SmallFiles(target.place, target.record_bytes, way) as small_files:
            return _measured(target, way, small_files, clock, report)


def _measured(
    target: Target, way: ColdWay, small_files: SmallFiles, clock: Clock, report: Progress
) -> DiskProfile:
    files, sizes, cursor, writing = target.files, target.files.sizes, Cursor(), Writing(target.place)
    stream = ColdAndWarm(files, way, Forward(sizes, CHUNK_BYTES, cursor, ahead=AHEAD))
    blocks = {size: ColdAndWarm(files, way, Forward(sizes, size, cursor)) for size in BLOCKS}
    plans = {depth: Scattered(sizes, target.record_bytes, depth=depth) for depth in DEPTHS}
    depths = {depth: ColdAndWarm(files, way, plans[depth]) for depth in DEPTHS}
    steps: list[Stage] = [ReadStep("the loader's pattern", stream)]
    steps += [ReadStep(f"sequential, {size >> 10} KiB", rates) for size, rates in blocks.items()]
    steps += [ReadStep(f"random, {depth} at once", rates) for depth, rates in depths.items()]
    run([*steps, small_files, writing], clock, report)
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
        missing=Missing(
            None if reads.cold else way.reason or STILL_CACHED, small_files.missing, writing.missing
        ),
        remarks=(*target.remarks, *server_remarks(target.filesystem)),
    )


def _of(rates: dict[int, ColdAndWarm]) -> list[tuple[int, Reads]]:
    return [(key, each.reads) for key, each in rates.items()]


def _no_progress(title: str, share: float) -> None:
    """Do nothing."""
