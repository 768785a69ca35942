"""The dry run of a conversion, which finds all problems, and estimates time and space."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, Literal

from shardprep.formats.conversion.plan import PlanOptions
from shardprep.formats.conversion.prepare import Conversion, ConvertOptions, PreparedSplit
from shardprep.formats.conversion.shard import ShardJob, is_other_file, shard_jobs
from shardprep.formats.errors import BadImage, DataError, UsageError
from shardprep.formats.images.decode import crashes_decoder
from shardprep.formats.images.header import read_image_header
from shardprep.formats.records.record import content_digest, record_crc
from shardprep.formats.records.schema import BadValue
from shardprep.formats.runtime.jobs import JobRunner, counted
from shardprep.formats.runtime.processes import usable_cpus
from shardprep.formats.runtime.progress import Progress, shown
from shardprep.formats.runtime.work_folder import WorkFolder
from shardprep.formats.sources.source import ByteReader, Problems, SourceOptions

SAMPLE_IMAGES = 4096  # at least, in whole shards
SAMPLE_EVERY = 8  # every 8th image is hashed, to measure how long that takes
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
        disk_bytes: Upper bound of the size of all files.
        checked: Number of images that were read.
        skipped: Number of these that are bad, and would be left out.
        ignored: Number of ignored files (hidden ones, and those of file managers), by name.
        already_complete: Whether the split is finished, and would only be verified.
        columns: Kinds of the columns besides key, label and image, by name.
        notes: Lines about other parts of the source that are left out.
        has_images: False if no record has an image.
        has_labels: False if no record has a label.
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
    checked: int
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
        problems: Errors that would make the conversion fail: the number of each kind, and the first one.
            Those of images are of the images that were read.
        skipped: Errors of the images that would be left out, in the same form.
        workers: Number of processes that ``seconds`` assumes.
        seconds: About how long the conversion would take, None if nothing was read: the time of reading at
            the rate of this run, and of hashing at that of one in SAMPLE_EVERY images. Writing is not
            measured, because nothing is written.
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
        """The exit code of ``prep`` for the conversion: 0, or the first problem's."""
        return next((problem.exit_code for problem in self.problems), 0)

    def to_json(self) -> dict[str, Any]:
        """Return the result as a JSON object."""
        return vars(self) | {
            "splits": [{**asdict(split), "path": str(split.path)} for split in self.splits],
            "problems": [problem.to_json() for problem in self.problems],
            "skipped": [problem.to_json() for problem in self.skipped],
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
    images: Literal["sample", "all"] = "sample",
) -> DryRun:
    """Find out what :func:`.convert.convert` with these arguments would do, without writing to the output.

    This lists, counts, labels and plans every split, checks the outputs, and reads images and checks their
    headers. Only images other than JPEG, PNG and WebP are decoded. A problem does not end the run:
    all problems are in the result.

    Args:
        source, output, split, plan_options, options, source_options: As for :func:`.convert.convert`.
        workers: Number of processes; None is one per usable CPU, 0 reads in this process.
        progress: Receives the progress; None shows a bar in a notebook.
        part: As for :func:`.convert.convert_part`: only this part's shards are read and counted. None is all.
        images: Which images are read: "all", or a "sample" of each split, those of some shards at equal
            distances, at least SAMPLE_IMAGES images and one shard for each process.

    Returns:
        The plan of each split, with all problems.

    Raises:
        UsageError: ``images`` is neither.
        WorkerDied: A process that reads images ended twice; the error names the image.
        MemoryError: There is not enough memory.
    """
    if images not in ("sample", "all"):
        raise UsageError(f"images must be 'sample' or 'all', not {images!r}")
    progress, problems, skipped = shown(progress), Problems(), Problems()
    count = usable_cpus() if workers is None else workers
    conversion = Conversion(source, output, split, plan_options, options, source_options, part=part)
    description, prepared = "", list[PreparedSplit]()
    with problems.collected():
        recognised = conversion.source(progress)
        description = recognised.description
        with problems.collected():
            conversion.check_outputs(recognised)
        prepared = conversion.prepared(recognised, problems, progress)
    splits, total = [], _Findings()
    least, runner = None if images == "all" else count, JobRunner(workers, progress=progress)
    for one in prepared:
        found = _Findings() if one.is_finished else _checked(one, least, runner)
        is_skipping = one.planned.options.on_bad_image == "skip"
        problems.merge(found.problems)
        (skipped if is_skipping else problems).merge(found.bad)
        listing, planned = one.listing, one.planned
        records = sum(shard.records for shard in one.shards)
        planned_split = PlannedSplit(
            split=listing.split,
            path=one.output,
            layout=listing.layout,
            images=records,
            classes=len(listing.labels),
            image_bytes=sum(int(planned.entries_of(shard)["length"].sum()) for shard in one.shards),
            container=planned.options.container,
            shards=len(one.shards),
            disk_bytes=one.most_bytes(one.shards),
            checked=found.images,
            skipped=found.bad_images if is_skipping else 0,
            ignored=listing.ignored,
            already_complete=one.is_finished,
            columns=listing.schema.kinds,
            notes=listing.notes,
            has_images=listing.has_images,
            has_labels=planned.has_labels,
        )
        splits.append(planned_split)
        if found.bad_images == records == len(listing.entries):
            problems.add(DataError("the source has no intact image", path=one.output))
        total.add(found)
    return DryRun(description, tuple(splits), problems, skipped, count, *total.estimate(count))


@dataclass
class _Findings:
    """The findings about images, and the seconds spent reading and hashing them.

    ``shards`` and ``size`` are the number and bytes of the shards to build, whether their images were read or
    not.
    """

    problems: Problems = field(default_factory=Problems)
    bad: Problems = field(default_factory=Problems)
    images: int = 0
    bad_images: int = 0
    read: float = 0.0
    read_bytes: int = 0
    hashed: float = 0.0
    hashed_bytes: int = 0
    shards: int = 0
    size: int = 0

    def add(self, other: _Findings) -> None:
        self.problems.merge(other.problems)
        self.bad.merge(other.bad)
        for name, value in vars(other).items():
            if not isinstance(value, Problems):
                setattr(self, name, getattr(self, name) + value)

    def check(self, job: ShardJob, reader: ByteReader, place: int) -> None:
        """Read and check the image and the columns at a place; hash some, as a conversion does."""
        entry, start, image = job.entries[place], perf_counter(), b""
        self.images += 1
        self.read_bytes += int(entry["length"])
        try:
            if place in job.crashes:
                raise BadImage(crashes_decoder(job.crashes[place]))
            if job.has_images:
                image = reader.read(entry)
                read_image_header(image)
            data = b"".join([image, *reader.values(entry)])
        except (BadImage, BadValue) as error:
            self.bad_images += 1
            advice = "; --skip-non-images leaves out such files" if is_other_file(reader, entry) else ""
            message = error.message + advice
            bad = BadImage(message, path=reader.where(entry), key=entry["key"].decode())
            self.bad.add(bad, _DETAILS.sub("", message))
            return
        finally:
            self.read += perf_counter() - start
        if place % SAMPLE_EVERY == 0:
            start, key, label = perf_counter(), entry["key"].item(), int(entry["label"])
            for _ in ("written", "read back"):
                record_crc(key, label, data)
            content_digest(key, label, data)
            hashlib.sha256(data)
            self.hashed += perf_counter() - start
            self.hashed_bytes += len(data)

    def estimate(self, workers: int) -> tuple[float | None, float | None]:
        """Return the estimated seconds of the conversion, and the bytes read per second."""
        at_once = max(1, min(workers, self.shards))
        if not self.hashed_bytes or not self.read or not self.read_bytes:
            return None, None
        per_byte = self.read / self.read_bytes
        return (per_byte + self.hashed / self.hashed_bytes) * self.size / at_once, at_once / per_byte


def _checked(one: PreparedSplit, least: int | None, runner: JobRunner) -> _Findings:
    """Check the images of the shards to build, or of a sample of ``least`` or more of these shards."""
    shards = [shard for shard in one.shards if not (one.output / shard.name).exists()]
    found = _Findings(shards=len(shards), size=sum(shard.size for shard in shards))
    if least is not None and (records := sum(shard.records for shard in shards)):
        count = min(len(shards), max(least, ceil(SAMPLE_IMAGES * len(shards) / records)))
        shards = [shards[number * len(shards) // count] for number in range(count)]
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108
    with TemporaryDirectory(dir=memory) as folder, WorkFolder(Path(folder)) as work_folder:
        jobs = (
            replace(job, output=one.output, builder=check_images)
            for job in shard_jobs(one.planned, shards, work_folder)
        )
        for checked in runner.run(f"check {one.listing.split}", jobs, work_folder.run, shards):
            found.add(checked)
    return found


def check_images(job: ShardJob) -> _Findings:
    """Read one shard's images and columns, check the images' headers, and hash a sample."""
    found, places = _Findings(), counted(job.run, job.shard.number, len(job.entries))
    with closing(places), found.problems.collected(), job.reader.open() as reader:
        reader.expect(job.entries)
        for place in places:
            with found.problems.collected():
                found.check(job, reader, place)
    return found
