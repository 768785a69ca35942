"""The dry run of a conversion: every problem that it would find, and its time and space."""

from __future__ import annotations

import hashlib
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from copy import copy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from shardprep.formats.conversion.plan import PlannedShard, PlanOptions
from shardprep.formats.conversion.prepare import (
    ConvertOptions,
    PreparedSplit,
    Request,
    most_bytes,
    note_untrained,
    prepare,
)
from shardprep.formats.conversion.shard import is_other_file
from shardprep.formats.errors import BadImage, DataError
from shardprep.formats.images.header import read_image_header
from shardprep.formats.records.codecs import BadValue
from shardprep.formats.records.record import content_digest, record_crc
from shardprep.formats.runtime.progress import NoProgress, Progress
from shardprep.formats.runtime.workers import WorkerPool, usable_cpus
from shardprep.formats.sources.source import ByteReader, Entries, Problems, SourceOptions

SAMPLE_EVERY = 8  # one image of so many is hashed, to measure how long that takes
_DETAILS = re.compile(r"\(.*?\)|\d+")


@dataclass(frozen=True)
class PlannedSplit:
    """One split as it would be converted.

    Attributes:
        split: "train", "val" or "test".
        path: Folder of its dataset.
        layout: The source's layout.
        images: Number of images in the source.
        classes: Number of classes in the source.
        image_bytes: Bytes of the images in the source.
        container: Container of the shards.
        shards: Number of shards.
        disk_bytes: The most bytes that all files can take.
        skipped: Number of bad images that would be left out.
        ignored: Number of files of file managers, and hidden ones, by name.
        already_complete: Whether it would only be verified.
        columns: Kinds of the columns beside key, label and image, by name.
        notes: Lines about other parts of the source that are left out.
        has_images: False where no record has an image.
        has_labels: False where no record has a label.
    """

    split: str
    path: Path
    layout: str
    images: int
    classes: int
    image_bytes: int
    container: str
    shards: int
    disk_bytes: int
    skipped: int
    ignored: Mapping[str, int]
    already_complete: bool
    columns: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    has_images: bool = True
    has_labels: bool = True


@dataclass(frozen=True)
class DryRun:
    """The result of :func:`plan_conversion`.

    Attributes:
        source: Description of the source, empty if it was not recognised.
        splits: Splits that could be listed.
        problems: Errors that would make the conversion fail: of each kind the number, and the first one.
        skipped: Errors of the images that it would leave out, likewise.
        workers: Number of processes that ``seconds`` assumes.
        seconds: About how long the conversion would take, None if nothing was read: the time in which these
            workers read all images in this run, and that of hashing them, by a sample of one in SAMPLE_EVERY.
            Writing is not measured, because nothing is written.
        read_rate: Bytes per second at which the images were read.
    """

    source: str
    splits: tuple[PlannedSplit, ...]
    problems: Problems
    skipped: Problems
    workers: int
    seconds: float | None = None
    read_rate: float | None = None

    @property
    def exit_code(self) -> int:
        """The exit code of ``prep`` for the conversion: 0, or that of the first problem."""
        return next((problem.exit_code for problem in self.problems), 0)

    def to_json(self) -> dict[str, Any]:
        """Return the result as a JSON object."""
        return {
            "source": self.source,
            "splits": [{**asdict(split), "path": str(split.path)} for split in self.splits],
            "problems": [problem.to_json() for problem in self.problems],
            "skipped": [problem.to_json() for problem in self.skipped],
            "workers": self.workers,
            "seconds": self.seconds,
            "read_rate": self.read_rate,
        }


def plan_conversion(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    split: str | None = None,
    plan_options: PlanOptions | None = None,
    options: ConvertOptions | None = None,
    source_options: SourceOptions | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
    part: tuple[int, int] | None = None,
) -> DryRun:
    """Return what :func:`.convert.convert` with these arguments would do; write nothing.

    Every split is listed, counted, labelled and planned, the outputs are checked, and every image is read and
    its header checked, which takes about as long as reading the source. Images are not decoded. Problems do
    not end it: all are in the result.

    Args:
        source: As for :func:`.convert.convert`.
        output: As for :func:`.convert.convert`.
        split: As for :func:`.convert.convert`.
        plan_options: As for :func:`.convert.convert`.
        options: As for :func:`.convert.convert`.
        source_options: As for :func:`.convert.convert`.
        workers: Number of processes; None is one per usable CPU, 0 reads in this process.
        progress: Receives the progress; None shows a bar in a notebook.
        part: As for :func:`.convert.convert_part`: only the shards of this part count and are read. None is
            all.

    Returns:
        The plan of each split, with all problems.

    Raises:
        WorkerDied, ChildLost: A process that reads images ended.
        MemoryError: There is too little memory.
    """
    progress, problems = progress or NoProgress(), Problems()
    count = usable_cpus() if workers is None else workers
    request = Request.of(source, output, split, plan_options, options, source_options, part)
    description, prepared = "", []
    with problems.collected():
        recognised = request.recognised()
        description = recognised.description
        progress.note(f"source: {description}")
        with problems.collected():
            request.check_outputs(recognised)
        prepared = prepare(recognised, request, problems)
        note_untrained(prepared, progress)
    check = _Check(problems, count, progress)
    splits = tuple(check.split(one) for one in prepared)
    return DryRun(description, splits, problems, check.skipped, count, *check.estimate())


@dataclass
class _ShardFindings:
    """The findings about the images of one shard, and the seconds that it took."""

    problems: Problems = field(default_factory=Problems)
    bad: Problems = field(default_factory=Problems)
    bad_images: int = 0
    read: float = 0.0
    hashed: float = 0.0
    hashed_bytes: int = 0

    def add(self, other: _ShardFindings) -> None:
        self.problems.merge(other.problems)
        self.bad.merge(other.bad)
        self.bad_images += other.bad_images
        self.read += other.read
        self.hashed += other.hashed
        self.hashed_bytes += other.hashed_bytes

    def read_by(self, reader: ByteReader, entry: np.void, *, has_images: bool) -> tuple[bytes, ...] | None:
        """Read an entry's image and columns, and check them; return their bytes, None for bad ones."""
        start, image = perf_counter(), b""
        try:
            if has_images:
                image = reader.read(entry)
                read_image_header(image)
            return image, *reader.values(entry)
        except (BadImage, BadValue) as error:
            self.bad_images += 1
            advice = "; --skip-non-images leaves out such files" if is_other_file(reader, entry) else ""
            message = error.message + advice
            bad = BadImage(message, path=reader.where(entry), key=entry["key"].decode())
            self.bad.add(bad, _DETAILS.sub("", message))
            return None
        finally:
            self.read += perf_counter() - start

    def hash(self, entry: np.void, data: bytes) -> None:
        """Hash the data of an entry as a conversion does with each image."""
        start = perf_counter()
        key, label = entry["key"].item(), int(entry["label"])
        for _ in ("written", "read back"):
            record_crc(key, label, data)
        content_digest(key, label, data)
        hashlib.sha256(data)
        self.hashed += perf_counter() - start
        self.hashed_bytes += len(data)


@dataclass
class _Check:
    """The check of all images of the prepared splits."""

    problems: Problems
    workers: int
    progress: Progress
    skipped: Problems = field(default_factory=Problems)
    total: _ShardFindings = field(default_factory=_ShardFindings)
    bytes: int = 0
    shards: int = 0

    def split(self, one: PreparedSplit) -> PlannedSplit:
        planned, is_finished = one.planned, one.is_finished
        found = _ShardFindings() if is_finished else self._images(one)
        is_skipping = planned.options.on_bad_image == "skip"
        self.problems.merge(found.problems)
        (self.skipped if is_skipping else self.problems).merge(found.bad)
        images = sum(shard.records for shard in one.shards)
        if found.bad_images == images == len(planned.order):
            self.problems.add(DataError("the source has no intact image", path=one.output))
        return PlannedSplit(
            split=planned.split,
            path=one.output,
            layout=one.listing.layout,
            images=images,
            classes=len(one.listing.labels),
            image_bytes=sum(int(planned.entries_of(shard)["length"].sum()) for shard in one.shards),
            container=planned.options.container,
            shards=len(one.shards),
            disk_bytes=most_bytes(planned, one.shards),
            skipped=found.bad_images if is_skipping else 0,
            ignored=one.listing.ignored,
            already_complete=is_finished,
            columns=planned.schema.kinds,
            notes=one.listing.notes,
            has_images=planned.has_images,
            has_labels=planned.has_labels,
        )

    def _images(self, one: PreparedSplit) -> _ShardFindings:
        """Check the images of the shards that are still to be built."""
        shards = [shard for shard in one.shards if not (one.output / shard.name).exists()]
        records, size = sum(shard.records for shard in shards), sum(shard.size for shard in shards)
        found, done = _ShardFindings(), np.zeros(2, np.int64)
        with self.progress.task(f"check {one.planned.split}", records=records, size=size):
            for shard, checked in zip(shards, self._checked(one, shards), strict=True):
                found.add(checked)
                done += (shard.records, shard.size)
                self.progress.at(*done.tolist())
        self.bytes += size
        self.shards += len(shards)
        self.total.add(found)
        return found

    def _checked(self, one: PreparedSplit, shards: Iterable[PlannedShard]) -> Iterator[_ShardFindings]:
        entries = map(one.planned.entries_of, shards)
        jobs = ((some, one.listing.reader.only(some), one.planned.has_images) for some in entries)
        if not self.workers:
            yield from (check_images(*job) for job in jobs)
            return
        with WorkerPool(self.workers) as pool:
            waiting: deque[Future[_ShardFindings]] = deque()
            for job in jobs:
                waiting.append(pool.submit(check_images, *job))
                if len(waiting) > self.workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()

    def estimate(self) -> tuple[float | None, float | None]:
        """Return the seconds that the conversion would take, and the bytes per second that were read."""
        total, at_once = self.total, max(1, min(self.workers, self.shards))
        if not total.hashed_bytes or not total.read:
            return None, None
        hashing = total.hashed / total.hashed_bytes * self.bytes
        return (total.read + hashing) / at_once, self.bytes * at_once / total.read


def check_images(entries: Entries, reader: ByteReader, has_images: bool = True) -> _ShardFindings:
    """Read the images and columns of one shard, check the images' headers, and hash some of them."""
    found = _ShardFindings()
    with found.problems.collected(), copy(reader) as opened:  # an open reader is of one process
        opened.expect(entries)
        for number, entry in enumerate(entries):
            with found.problems.collected():
                parts = found.read_by(opened, entry, has_images=has_images)
                if parts is not None and number % SAMPLE_EVERY == 0:
                    found.hash(entry, b"".join(parts))
    return found
