"""Conversion of a source to published shards, in one call or in parts on several machines.

The dry run finds all problems, and estimates time and space.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, Literal, TypeVar

import numpy as np

from shardprep.formats.conversion.join import is_being_joined
from shardprep.formats.conversion.plan import PlanOptions, writer_versions
from shardprep.formats.conversion.prepare import (
    Conversion,
    ConvertOptions,
    PreparedSplit,
    class_notes,
    lock_dataset,
)
from shardprep.formats.conversion.shard import (
    BuiltShard,
    ShardJob,
    SkippedImage,
    finish,
    is_non_image,
    shard_jobs,
)
from shardprep.formats.errors import BadImage, DataError, UsageError
from shardprep.formats.images.decode import crash_reason
from shardprep.formats.images.header import cause_of, read_image_header
from shardprep.formats.records.record import content_digest, record_crc
from shardprep.formats.records.schema import BadValue
from shardprep.formats.runtime.jobs import JobRunner, counted_range
from shardprep.formats.runtime.processes import usable_cpus
from shardprep.formats.runtime.progress import Progress, count_of, progress_or_bar
from shardprep.formats.runtime.work_folder import (
    WORK_FOLDER_NAME,
    WorkFolder,
    add_resume_note,
    describe_finished,
    finished_shards,
)
from shardprep.formats.shards.columns import remove_unlisted_columns
from shardprep.formats.shards.manifest import Manifest
from shardprep.formats.shards.read import (
    ARCHIVE_NAME,
    IN_PLACE,
    MANIFEST_NAME,
    OUTPUT_FILES,
    FileEntry,
    is_linked,
    link_archive,
)
from shardprep.formats.sources.listing import StoredEntries
from shardprep.formats.sources.source import ByteReader, Listing, Problems, SourceOptions
from shardprep.formats.storage.store import Location
from shardprep.formats.verification.checks import read_quarantine
from shardprep.formats.verification.verify import verify

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SkippedCause:
    """A cause for which ``count`` images were left out, and the key of the ``first``."""

    cause: str
    count: int
    first: str

    def __str__(self) -> str:
        return f"{self.count:,} {self.cause} (first: {self.first})"


@dataclass(frozen=True)
class SkippedImages:
    """The images that were left out.

    ``count`` is their number. ``causes`` has a :class:`SkippedCause` for each cause, the most frequent first.
    ``emptied`` has the names of the classes left without images; they keep their labels.
    """

    count: int = 0
    causes: tuple[SkippedCause, ...] = ()
    emptied: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return "12 images: 7 not an image (first: a/b.txt), 5 truncated (first: a/c.jpg)"."""
        images = count_of(self.count, "image")
        return f"{images}: {', '.join(map(str, self.causes))}" if self.causes else images


@dataclass(frozen=True, kw_only=True)
class ConvertedSplit:
    """The outcome of a conversion of one split, whether into a folder or into object storage."""

    manifest: Manifest
    already_complete: bool
    skipped: SkippedImages
    ignored: Mapping[str, int]
    notes: tuple[str, ...]
    has_labels: bool


@dataclass(frozen=True, kw_only=True)
class Converted(ConvertedSplit):
    """One converted split.

    Attributes:
        path: The split's folder.
        manifest: The split's manifest.
        already_complete: Whether an earlier call had finished it, so that this one only verified it.
        skipped: Bad images that were left out, by cause, and the classes left without images.
        ignored: Number of ignored files and folders (hidden ones, and those of file managers), by name.
        notes: Lines about other omissions, and about images in columns that do not fit their records' images.
        has_labels: False if no record of the source has a label.
    """

    path: Path


def convert(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    split: str | None = None,
    plan_options: PlanOptions | None = None,
    options: ConvertOptions | None = None,
    source_options: SourceOptions | None = None,
    workers: int | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> list[Converted]:
    """Convert a source to shards. After a kill at any point, the same call finishes the conversion.

    The resulting bytes do not depend on the number of workers or interruptions. An interruption, such as
    KeyboardInterrupt, gets a note that says how many shards the next call keeps.

    Args:
        source: Path of archives, an image tree, a tensorpack LMDB, WebDataset tars, TFRecord or Parquet
            files, or a list of images; or the URL of a folder of official archives in object storage or on a
            server, which are read in place, in ranges.
        output: Folder of the dataset if ``split`` is given. Otherwise each split found is converted into
            ``output/<split>``.
        split: "train", "val" or "test"; None converts all.
        plan_options: Options that decide the bytes of the output; None is the defaults.
        options: Other options of the conversion; None is the defaults.
        source_options: Options of reading the source; None is the defaults.
        workers: Number of processes. None is one per usable CPU. 0 works in this process, except for decode
            checks, and files named like images that have to be decoded, which need a process that may crash.
        executor: An executor of :mod:`concurrent.futures`, local or on many machines, that runs the shard
            jobs instead, and is left open. At most ``workers`` jobs are submitted at a time; None is 256.
        progress: Receives the progress; None shows a bar in a notebook.

    Returns:
        The converted splits.

    Raises:
        UsageError: An argument is invalid; PlanMismatch if ``output`` contains another conversion.
        DataError: The source is damaged or incomplete.
        OperationError: OutputBusy, NoSpace or WorkerDied; with an ``executor`` also ExecutorFailed or
            OtherMachine.
        OSError: A file cannot be read or written.
    """
    progress = progress_or_bar(progress)
    conversion = Conversion(source, output, split, plan_options, options, source_options)
    if executor is not None and isinstance(conversion.path, Location):
        raise UsageError(
            "is a URL, which only one machine can convert from; leave out the executor, or download the "
            "archives",
            path=conversion.path.url,
        )
    runner = JobRunner(workers, executor, progress)
    return prepare_and_convert(conversion, progress, partial(_convert_split, runner=runner))


def prepare_and_convert(
    conversion: Conversion, progress: Progress, convert_one: Callable[[PreparedSplit], T]
) -> list[T]:
    """Prepare all splits, raise their problems, then convert the splits one by one."""
    source, problems = conversion.recognise_source(progress), Problems()
    conversion.check_outputs(source)
    if conversion.part:
        for split, output in conversion.outputs(source).items():
            with problems.collect():
                conversion.share_listing(source, split, output, progress)
        problems.raise_all()
    prepared = conversion.prepare(source, problems, progress)
    problems.raise_all()
    return convert_splits(prepared, convert_one, restart=conversion.options.restart)


def convert_splits(
    prepared: Sequence[PreparedSplit], convert_one: Callable[[PreparedSplit], T], *, restart: bool
) -> list[T]:
    """Convert splits one by one. An interruption notes how many shards are kept.

    A ``restart`` discards the unfinished work of all splits before the first is converted, so that an
    interrupted run can be continued without another restart.
    """
    for split in prepared if restart else ():
        if not split.is_finished:
            with WorkFolder(split.output) as work_folder:
                if not split.is_finished:  # another run may have finished it since
                    work_folder.discard(OUTPUT_FILES)
    done = []
    for split in prepared:
        describe = partial(describe_finished, split.output, [shard.name for shard in split.shards])
        with add_resume_note(describe, restarted=restart):
            done.append(convert_one(split))
    return done


def _convert_split(prepared: PreparedSplit, runner: JobRunner) -> Converted:
    output = prepared.output
    with prepared.begin_work() as work_folder:
        if work_folder is not None:
            built = build_shards(prepared, work_folder, runner)
            manifest = finish(work_folder, prepared, built)
            return Converted(path=output, **outcome(prepared, manifest, built))
    manifest = prepared.read_finished_manifest()
    link, archive = output / ARCHIVE_NAME, prepared.listing.reader.archive
    if manifest.archive and archive and not is_linked(link, archive.path):  # it has moved
        with lock_finished(output, manifest) as work_folder:
            link_archive(link, archive.path, work_folder.run)
    verify_finished(output, runner.progress)
    skipped = [SkippedImage(**image) for image in read_quarantine(output)] if manifest.skipped else []
    found = outcome(prepared, manifest, None, skipped)
    return Converted(path=output, **found | {"notes": (*found["notes"], *_newer_note(prepared))})


def _newer_note(prepared: PreparedSplit) -> Iterator[str]:
    """Yield a note if files of the source are newer than the finished dataset."""
    entries = prepared.listing.entries
    times = [archive.mtime_ns for archive in prepared.listing.archives]
    times += (entries[name].max() for name in entries.dtype.names or () if name.startswith("mtime_ns"))
    if max(times) > (prepared.output / MANIFEST_NAME).stat().st_mtime_ns:
        yield (
            "files of the source are newer than this dataset, and only the records' keys, labels and sizes are compared; "
            "to take over other changes, convert into another folder"
        )


def outcome(
    prepared: PreparedSplit,
    manifest: Manifest,
    built: Sequence[BuiltShard] | None,
    skipped: Sequence[SkippedImage] = (),
) -> dict[str, Any]:
    """Return the attributes of a ConvertedSplit: ``built`` now, or before, with these images ``skipped``."""
    listing = prepared.listing
    return {
        "manifest": manifest,
        "already_complete": built is None,
        "skipped": summarise_skipped(listing, built or (), skipped),
        "ignored": listing.ignored,
        "notes": (
            *listing.notes,
            *_column_notes(prepared, built or ()),
            *class_notes(prepared.output, manifest, ("", *manifest.schema.names)),
        ),
        "has_labels": prepared.plan.has_labels,
    }


def _column_notes(prepared: PreparedSplit, built: Sequence[BuiltShard]) -> Iterator[str]:
    """Yield a note for each column with images of other sizes than their records', and one on shrinking."""
    has_places = any(field.kind.endswith(("image", "json", "]")) for field in prepared.listing.schema)
    if has_places and prepared.plan.options.shorter_side is not None:
        yield "--shorter-side shrinks only the images: masks, and positions in pixels, stay as they are in the columns"
    of_column = zip(*(shard.columns for shard in built), strict=True)
    for column, built_columns in zip(prepared.listing.schema, of_column, strict=False):
        if others := [each for each in built_columns if each.other_sizes]:
            count = count_of(sum(each.other_sizes for each in others), "image")
            yield (
                f"{count} in the column {column.name} with a size other than the record's image (first: "
                f"{others[0].first_other}); training refuses them as masks"
            )


def build_shards(
    prepared: PreparedSplit,
    work_folder: WorkFolder,
    runner: JobRunner,
    builder: Callable[[ShardJob], Any] | None = None,
) -> list[BuiltShard]:
    """Build a split's missing shards, and return all of them. ``builder`` replaces ``build_shard``."""
    plan, shards, listing = prepared.plan, prepared.shards, prepared.listing
    if listing.cache_key is not None:
        stored = StoredEntries(work_folder.folder, listing.cache_key)
        if stored.read() is None:
            stored.write(listing.entries, work_folder.run)
    home = writer_versions(plan.options) if runner.executor else None
    jobs = shard_jobs(plan, shards, work_folder, home_versions=home, builder=builder)
    finished = {shard.name for shard in shards} & finished_shards(prepared.output)
    if kept := describe_finished(prepared.output, [shard.name for shard in shards]):
        runner.progress.note(f"{kept} already")
    verb = "index" if plan.options.container == IN_PLACE else "convert"
    return runner.run(f"{verb} {listing.split}", jobs, work_folder.run, shards, finished)


@dataclass(frozen=True)
class ConvertedPart:
    """One part's shards of one split.

    Attributes:
        path: The split's folder.
        split: "train", "val" or "test".
        part: The part's number, from 1, and the number of parts.
        shards: Names of the part's shards, all finished.
        records: Number of records in these shards.
        file_bytes: Size of these shards.
        total: Number of shards in the split.
        missing: Number of shards in the split that are not finished yet.
        already_complete: Whether the whole split was finished before, so that nothing was read.
        skipped: Bad images that these shards left out, by cause.
        has_images: False if no record has an image.
        has_labels: False if no record has a label.
    """

    path: Path
    split: str
    part: tuple[int, int]
    shards: tuple[str, ...]
    records: int
    file_bytes: int
    total: int
    missing: int
    already_complete: bool
    skipped: SkippedImages = field(default_factory=SkippedImages)
    has_images: bool = True
    has_labels: bool = True


def convert_part(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    part: tuple[int, int],
    *,
    split: str | None = None,
    plan_options: PlanOptions | None = None,
    options: ConvertOptions | None = None,
    source_options: SourceOptions | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> list[ConvertedPart]:
    """Build the shards of one part of a conversion, without publishing a manifest.

    Shards are dealt to the parts one by one, over all splits. Parts run in any order, any number at a time,
    on any machines that see the same source and output. Repeating a part, or running it twice at once,
    changes nothing. After all parts, :func:`.convert.convert` with the same arguments builds what is missing,
    and finishes. The bytes are the same as from a single call.

    Args:
        source, output, split, plan_options, options, source_options: As for :func:`.convert.convert`, and the
            same for all parts; ``restart`` is refused.
        part: (i, n), the i-th part of n, numbered from 1.
        workers: Number of processes, as for :func:`.convert.convert`.
        progress: Receives the progress; None shows a bar in a notebook.

    Returns:
        The part's shards of each split.

    Raises:
        PlanMismatch: Another part has different options, sources, or versions of libraries that write shards.
        OutputBusy: The output is being converted without ``part``.
        UsageError: The part does not exist, or ``restart`` is given.
        ShardprepError: Other errors of :func:`.convert.convert`.
    """
    progress = progress_or_bar(progress)
    conversion = Conversion(source, output, split, plan_options, options, source_options, part=part)
    if conversion.options.restart:
        raise UsageError(
            "a part cannot restart, because other parts work there; remove the output, or restart without a "
            "part"
        )
    runner = JobRunner(workers, progress=progress)
    return prepare_and_convert(conversion, progress, partial(_build_part, part=part, runner=runner))


def _build_part(prepared: PreparedSplit, *, part: tuple[int, int], runner: JobRunner) -> ConvertedPart:
    """Build one part's shards of a split. Raises PlanMismatch if it was finished with another plan."""
    plan, skipped, missing = prepared.plan, SkippedImages(), set[str]()
    shards: Sequence[BuiltShard | FileEntry]
    with prepared.begin_work(shared=True) as work_folder:
        if work_folder is None:
            runner.progress.note(f"{prepared.output} is complete already")
            names = {shard.name for shard in prepared.shards}
            shards = [entry for entry in prepared.read_finished_manifest().shards if entry.name in names]
        else:
            built = shards = build_shards(prepared, work_folder, runner)
            skipped = summarise_skipped(prepared.listing, built)
            missing = {shard.name for shard in plan.shards} - finished_shards(prepared.output)
    return ConvertedPart(
        path=prepared.output,
        split=prepared.listing.split,
        part=part,
        shards=tuple(shard.name for shard in shards),
        records=sum(shard.records for shard in shards),
        file_bytes=sum(shard.size for shard in shards),
        total=len(plan.shards),
        missing=len(missing),
        already_complete=work_folder is None,
        skipped=skipped,
        has_images=prepared.listing.has_images,
        has_labels=plan.has_labels,
    )


def verify_finished(output: Path, progress: Progress) -> None:
    """Verify an already finished dataset, and remove a leftover work folder."""
    progress.note(f"{output} is complete already; verifying it")
    report = verify(output, progress=progress)
    report.raise_for_findings()
    if report.manifest and (output / WORK_FOLDER_NAME).exists():
        with lock_finished(output, report.manifest):
            pass


@contextmanager
def lock_finished(path: Path, manifest: Manifest) -> Iterator[WorkFolder]:
    """Lock a finished dataset, and at the end remove the leftovers of unfinished work, except of a join."""
    with lock_dataset(path, manifest) as work_folder:
        yield work_folder
        if not is_being_joined(work_folder, manifest):
            remove_unlisted_columns(path, {file.name for file in manifest.files})
            work_folder.remove()


def summarise_skipped(
    listing: Listing, built: Iterable[BuiltShard], before: Sequence[SkippedImage] = ()
) -> SkippedImages:
    """Summarise the images that were left out of the shards, or ``before``."""
    skipped, entries = [*before, *(image for shard in built for image in shard.skipped)], listing.entries
    if not skipped:
        return SkippedImages()
    keys_of = defaultdict(list)
    for image in skipped:
        keys_of[cause_of(image.reason)].append(image.key)
    left_out = np.isin(entries["key"], [image.key.encode() for image in skipped])
    labels = entries["label"]
    emptied = np.setdiff1d(labels[labels >= 0], labels[~left_out])
    causes = [SkippedCause(cause, len(keys), min(keys)) for cause, keys in keys_of.items()]
    return SkippedImages(
        count=len(skipped),
        causes=tuple(sorted(causes, key=lambda cause: (-cause.count, cause.cause))),
        emptied=tuple(listing.labels.classes[label].name for label in emptied.tolist()),
    )


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
    progress, problems, skipped = progress_or_bar(progress), Problems(), Problems()
    count = usable_cpus() if workers is None else workers
    conversion = Conversion(source, output, split, plan_options, options, source_options, part=part)
    description, prepared_splits = "", list[PreparedSplit]()
    with problems.collect():
        recognised = conversion.recognise_source(progress)
        description = recognised.description
        with problems.collect():
            conversion.check_outputs(recognised)
        prepared_splits = conversion.prepare(recognised, problems, progress)
    splits, total = [], _Findings()
    least, runner = None if images == "all" else count, JobRunner(workers, progress=progress)
    for prepared in prepared_splits:
        findings = _Findings() if prepared.is_finished else _check_split(prepared, least, runner)
        is_skipping = prepared.plan.options.on_bad_image == "skip"
        problems.merge(findings.problems)
        (skipped if is_skipping else problems).merge(findings.bad)
        listing, plan = prepared.listing, prepared.plan
        records = sum(shard.records for shard in prepared.shards)
        planned_split = PlannedSplit(
            split=listing.split,
            path=prepared.output,
            layout=listing.layout,
            images=records,
            classes=len(listing.labels),
            image_bytes=sum(int(plan.entries_of(shard)["length"].sum()) for shard in prepared.shards),
            container=plan.options.container,
            shards=len(prepared.shards),
            disk_bytes=prepared.max_bytes(prepared.shards),
            checked=findings.images,
            skipped=findings.bad_images if is_skipping else 0,
            ignored=listing.ignored,
            already_complete=prepared.is_finished,
            columns=listing.schema.kinds,
            notes=listing.notes,
            has_images=listing.has_images,
            has_labels=plan.has_labels,
        )
        splits.append(planned_split)
        if findings.bad_images == records == len(listing.entries):
            problems.add(DataError("the source has no intact image", path=prepared.output))
        total.add(findings)
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
                raise BadImage(crash_reason(job.crashes[place]))
            if job.has_images:
                image = reader.read(entry)
                read_image_header(image)
            data = b"".join([image, *reader.values(entry)])
        except (BadImage, BadValue) as error:
            self.bad_images += 1
            advice = "; --skip-non-images leaves out such files" if is_non_image(reader, entry) else ""
            message = error.message + advice
            bad = BadImage(message, path=reader.location_of(entry), key=entry["key"].decode())
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


def _check_split(split: PreparedSplit, least: int | None, runner: JobRunner) -> _Findings:
    """Check the images of the shards to build, or of a sample of ``least`` or more of these shards."""
    shards = [shard for shard in split.shards if not (split.output / shard.name).exists()]
    findings = _Findings(shards=len(shards), size=sum(shard.size for shard in shards))
    if least is not None and (records := sum(shard.records for shard in shards)):
        count = min(len(shards), max(least, ceil(SAMPLE_IMAGES * len(shards) / records)))
        shards = [shards[number * len(shards) // count] for number in range(count)]
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108
    with TemporaryDirectory(dir=memory) as folder, WorkFolder(Path(folder)) as work_folder:
        jobs = (
            replace(job, output=split.output, builder=check_images)
            for job in shard_jobs(split.plan, shards, work_folder)
        )
        for checked in runner.run(f"check {split.listing.split}", jobs, work_folder.run, shards):
            findings.add(checked)
    return findings


def check_images(job: ShardJob) -> _Findings:
    """Read one shard's images and columns, check the images' headers, and hash a sample."""
    findings, places = _Findings(), counted_range(job.run, job.shard.number, len(job.entries))
    with closing(places), findings.problems.collect(), job.reader.open() as reader:
        reader.expect(job.entries)
        for place in places:
            with findings.problems.collect():
                findings.check(job, reader, place)
    return findings
