"""The dry run of a conversion, which finds all problems, and estimates time and space."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from shardprep.formats.conversion.plan import PlanOptions
from shardprep.formats.conversion.prepare import Conversion, ConvertOptions, PreparedSplit
from shardprep.formats.conversion.shard import ShardJob, is_other_file, shard_jobs
from shardprep.formats.errors import BadImage, DataError
from shardprep.formats.images.decode import crashes_decoder
from shardprep.formats.images.header import read_image_header
from shardprep.formats.records.record import content_digest, record_crc
from shardprep.formats.records.schema import BadValue
from shardprep.formats.runtime.jobs import JobRunner, counted
from shardprep.formats.runtime.processes import usable_cpus
from shardprep.formats.runtime.progress import Progress, shown
from shardprep.formats.runtime.work_folder import WorkFolder
from shardprep.formats.sources.source import ByteReader, Problems, SourceOptions

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
        skipped: Number of bad images that would be left out.
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
        skipped: Errors of the images that would be left out, in the same form.
        workers: Number of processes that ``seconds`` assumes.
        seconds: About how long the conversion would take, None if nothing was read. It is the time that
            reading all images took with these workers, and that of hashing them, by a sample of one in
            SAMPLE_EVERY. Writing is not measured, because nothing is written.
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
    """Find out what :func:`.convert.convert` with these arguments would do, without writing to the output.

    This lists, counts, labels and plans every split, checks the outputs, and reads every image and checks its
    header, which takes about as long as reading the source. Of images, only those of other kinds than JPEG,
    PNG and WebP are decoded. A problem does not end the run: all problems are in the result.

    Args:
        source, output, split, plan_options, options, source_options: As for :func:`.convert.convert`.
        workers: Number of processes; None is one per usable CPU, 0 reads in this process.
        progress: Receives the progress; None shows a bar in a notebook.
        part: As for :func:`.convert.convert_part`: only this part's shards are read and counted. None is all.

    Returns:
        The plan of each split, with all problems.

    Raises:
        WorkerDied: A process that reads images ended twice; the error names the image.
        MemoryError: There is not enough memory.
    """
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
    for one in prepared:
        found = _Findings() if one.is_finished else _checked(one, JobRunner(workers, progress=progress))
        is_skipping = one.planned.options.on_bad_image == "skip"
        problems.merge(found.problems)
        (skipped if is_skipping else problems).merge(found.bad)
        listing, planned = one.listing, one.planned
        images = sum(shard.records for shard in one.shards)
        planned_split = PlannedSplit(
            split=listing.split,
            path=one.output,
            layout=listing.layout,
            images=images,
            classes=len(listing.labels),
            image_bytes=sum(int(planned.entries_of(shard)["length"].sum()) for shard in one.shards),
            container=planned.options.container,
            shards=len(one.shards),
            disk_bytes=one.most_bytes(one.shards),
            skipped=found.bad_images if is_skipping else 0,
            ignored=listing.ignored,
            already_complete=one.is_finished,
            columns=listing.schema.kinds,
            notes=listing.notes,
            has_images=listing.has_images,
            has_labels=planned.has_labels,
        )
        splits.append(planned_split)
        if found.bad_images == images == len(listing.entries):
            problems.add(DataError("the source has no intact image", path=one.output))
        total.add(found)
    return DryRun(description, tuple(splits), problems, skipped, count, *total.estimate(count))


@dataclass
class _Findings:
    """The findings about the images of some shards, and the seconds spent reading and hashing them."""

    problems: Problems = field(default_factory=Problems)
    bad: Problems = field(default_factory=Problems)
    bad_images: int = 0
    read: float = 0.0
    hashed: float = 0.0
    hashed_bytes: int = 0
    shards: int = 0
    size: int = 0

    def add(self, other: _Findings) -> None:
        self.problems.merge(other.problems)
        self.bad.merge(other.bad)
        for name in ("bad_images", "read", "hashed", "hashed_bytes", "shards", "size"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def check(self, job: ShardJob, reader: ByteReader, place: int) -> None:
        """Read and check the image and the columns at a place; hash some, as a conversion does."""
        entry, start, image = job.entries[place], perf_counter(), b""
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
        if not self.hashed_bytes or not self.read:
            return None, None
        hashing = self.hashed / self.hashed_bytes * self.size
        return (self.read + hashing) / at_once, self.size * at_once / self.read


def _checked(one: PreparedSplit, runner: JobRunner) -> _Findings:
    shards = [shard for shard in one.shards if not (one.output / shard.name).exists()]
    found = _Findings(shards=len(shards), size=sum(shard.size for shard in shards))
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
