"""Conversion of a source to published shards, in one call or in parts on several machines.

At the end come the tables, the provenance and, last, the manifest.
"""

from __future__ import annotations

import os
import socket
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from shardprep.formats.conversion.plan import Plan, PlanOptions, versions_for
from shardprep.formats.conversion.prepare import Conversion, ConvertOptions, PreparedSplit
from shardprep.formats.conversion.shard import (
    BuiltFile,
    BuiltShard,
    ShardJob,
    SkippedImage,
    built_row,
    entry_of,
    shard_jobs,
)
from shardprep.formats.errors import DataError, UsageError
from shardprep.formats.images.header import ImageFlag, cause_of
from shardprep.formats.records.record import content_root
from shardprep.formats.records.schema import Schema
from shardprep.formats.runtime.files import flush_file, hash_file, naming, publish, publish_bytes
from shardprep.formats.runtime.jobs import JobRunner
from shardprep.formats.runtime.json_record import canonical_json
from shardprep.formats.runtime.progress import Progress, count_of, shown
from shardprep.formats.runtime.work_folder import (
    WORK_FOLDER_NAME,
    WorkFolder,
    finished_shards,
    noting_kept,
    shards_kept,
)
from shardprep.formats.shards.columns import (
    BOX_DTYPE,
    ColumnEntry,
    DatasetColumns,
    column_row,
    remove_unlisted_columns,
    table_name,
)
from shardprep.formats.shards.manifest import (
    BOXES_NAME,
    INDEX_NAME,
    MANIFEST_NAME,
    PROVENANCE_NAME,
    QUARANTINE_NAME,
    Manifest,
    index_dtype,
    index_row_of,
    kinds_in,
    tables_of,
)
from shardprep.formats.shards.read import (
    ARCHIVE_NAME,
    BLOCK_BYTES,
    IN_PLACE,
    OUTPUT_FILES,
    FileEntry,
    IndexedArchive,
    Rows,
    RowType,
    container,
    is_linked,
    link_archive,
    read_table,
    table_header,
)
from shardprep.formats.sources.listing import StoredEntries
from shardprep.formats.sources.source import Listing, Problems, SourceOptions
from shardprep.formats.storage.store import Location
from shardprep.formats.verification.checks import quarantined
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
    progress = shown(progress)
    conversion = Conversion(source, output, split, plan_options, options, source_options)
    if executor is not None and isinstance(conversion.path, Location):
        raise UsageError(
            "is a URL, which only one machine can convert from; leave out the executor, or download the "
            "archives",
            path=conversion.path.url,
        )
    runner = JobRunner(workers, executor, progress)
    return convert_each(conversion, progress, partial(_converted, runner=runner))


def convert_each(
    conversion: Conversion, progress: Progress, convert_one: Callable[[PreparedSplit], T]
) -> list[T]:
    """Prepare all splits, raise their problems, then convert the splits one by one."""
    source, problems = conversion.source(progress), Problems()
    conversion.check_outputs(source)
    if conversion.part:
        for split, output in conversion.outputs(source).items():
            with problems.collected():
                conversion.share_listing(source, split, output, progress)
        problems.raise_all()
    prepared = conversion.prepared(source, problems, progress)
    problems.raise_all()
    return convert_prepared(prepared, convert_one, restart=conversion.options.restart)


def convert_prepared(
    prepared: Sequence[PreparedSplit], convert_one: Callable[[PreparedSplit], T], *, restart: bool
) -> list[T]:
    """Convert splits one by one. An interruption notes how many shards are kept.

    A ``restart`` discards the unfinished work of all splits before the first is converted, so that an
    interrupted run can be continued without another restart.
    """
    for one in prepared if restart else ():
        if not one.is_finished:
            with WorkFolder(one.output) as work_folder:
                if not one.is_finished:  # another run may have finished it since
                    work_folder.discard(OUTPUT_FILES)
    done = []
    for one in prepared:
        kept = partial(shards_kept, one.output, [shard.name for shard in one.shards])
        with noting_kept(kept, restarted=restart):
            done.append(convert_one(one))
    return done


def _converted(prepared: PreparedSplit, runner: JobRunner) -> Converted:
    output = prepared.output
    with prepared.begun() as work_folder:
        if work_folder is not None:
            built = build_shards(prepared, work_folder, runner)
            manifest = finish(work_folder, prepared, built)
            return Converted(path=output, **outcome(prepared, manifest, built))
    manifest = prepared.finished_manifest()
    link, archive = output / ARCHIVE_NAME, prepared.listing.reader.archive
    if manifest.archive and archive and not is_linked(link, archive.path):  # it has moved
        with mending(output, manifest) as work_folder:
            link_archive(link, archive.path, work_folder.run)
    verify_finished(output, runner.progress)
    skipped = [SkippedImage(**image) for image in quarantined(output)] if manifest.skipped else []
    return Converted(path=output, **outcome(prepared, manifest, None, skipped))


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
        "skipped": sum_up(listing, built or (), skipped),
        "ignored": listing.ignored,
        "notes": (*listing.notes, *_notes_on_columns(prepared, built or ())),
        "has_labels": prepared.planned.has_labels,
    }


def _notes_on_columns(prepared: PreparedSplit, built: Sequence[BuiltShard]) -> Iterator[str]:
    """Yield a note for each column with images of other sizes than their records'."""
    of_column = zip(*(shard.columns for shard in built), strict=True)
    for column, built_columns in zip(prepared.listing.schema, of_column, strict=False):
        if others := [one for one in built_columns if one.other_sizes]:
            count = count_of(sum(one.other_sizes for one in others), "image")
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
    planned, shards, listing = prepared.planned, prepared.shards, prepared.listing
    if listing.kept_by is not None:
        stored = StoredEntries(work_folder.folder, listing.kept_by)
        if stored.read() is None:
            stored.write(listing.entries, work_folder.run)
    home = versions_for(planned.options) if runner.executor else None
    jobs = shard_jobs(planned, shards, work_folder, home=home, builder=builder)
    finished = {shard.name for shard in shards} & finished_shards(prepared.output)
    if kept := shards_kept(prepared.output, [shard.name for shard in shards]):
        runner.progress.note(f"{kept} already")
    verb = "index" if planned.options.container == IN_PLACE else "convert"
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
    progress = shown(progress)
    conversion = Conversion(source, output, split, plan_options, options, source_options, part=part)
    if conversion.options.restart:
        raise UsageError(
            "a part cannot restart, because other parts work there; remove the output, or restart without a "
            "part"
        )
    runner = JobRunner(workers, progress=progress)
    return convert_each(conversion, progress, partial(_built_part, part=part, runner=runner))


def _built_part(prepared: PreparedSplit, *, part: tuple[int, int], runner: JobRunner) -> ConvertedPart:
    """Build one part's shards of a split. Raises PlanMismatch if it was finished with another plan."""
    planned, skipped, missing = prepared.planned, SkippedImages(), set[str]()
    shards: Sequence[BuiltShard | FileEntry] | None = None
    with prepared.begun(shared=True) as work_folder:
        if work_folder is not None:
            built = shards = build_shards(prepared, work_folder, runner)
            skipped = sum_up(prepared.listing, built)
            missing = {shard.name for shard in planned.shards} - finished_shards(prepared.output)
    if is_complete := shards is None:
        runner.progress.note(f"{prepared.output} is complete already")
        names = {shard.name for shard in prepared.shards}
        shards = [entry for entry in prepared.finished_manifest().shards if entry.name in names]
    return ConvertedPart(
        path=prepared.output,
        split=prepared.listing.split,
        part=part,
        shards=tuple(shard.name for shard in shards),
        records=sum(shard.records for shard in shards),
        file_bytes=sum(shard.size for shard in shards),
        total=len(planned.shards),
        missing=len(missing),
        already_complete=is_complete,
        skipped=skipped,
        has_images=prepared.listing.has_images,
        has_labels=planned.has_labels,
    )


TABLE_NAMES = {INDEX_NAME, BOXES_NAME, QUARANTINE_NAME}


def finish(work_folder: WorkFolder, prepared: PreparedSplit, built: Sequence[BuiltShard]) -> Manifest:
    """Publish the tables, the provenance and, last, the manifest, then remove the work folder."""
    output = work_folder.output
    manifest = gather(work_folder, prepared, built)
    if archive := prepared.planned.in_place:
        link_archive(output / ARCHIVE_NAME, archive.path, work_folder.run)
    publish_bytes(output / PROVENANCE_NAME, canonical_json(_provenance(prepared.listing)), work_folder.run)
    publish_bytes(output / MANIFEST_NAME, manifest.to_bytes(), work_folder.run)
    work_folder.remove()
    return manifest


def gather(work_folder: WorkFolder, prepared: PreparedSplit, built: Sequence[BuiltShard]) -> Manifest:
    """Publish the tables of all shards, and return the manifest. Raises DataError if there are no images."""
    output, planned, listing = work_folder.output, prepared.planned, prepared.listing
    if not any(b.records for b in built):
        raise DataError("the source has no intact image", path=output)
    index = index_of(work_folder, planned, built)
    tables = build_tables(work_folder, index, built, prepared.boxes)
    records_root = content_root(rows["digest"].tobytes() for rows in shard_rows(work_folder, built))
    columns = None
    if len(listing.schema) or not listing.has_images:
        entries = tuple(column_entries(work_folder, listing.schema, built))
        columns = DatasetColumns(entries, records_root, listing.has_images)
    archive = None
    if planned.in_place:
        regions = tuple(
            replace(region, sha256=shard.region_sha256)
            for region, shard in zip(planned.regions, built, strict=True)
        )
        archive = IndexedArchive(planned.in_place.path.name, regions, BLOCK_BYTES)
    manifest = Manifest(
        split=listing.split,
        records=len(index),
        image_bytes=sum(b.image_bytes for b in built),
        partial=listing.is_partial,
        class_sorted=planned.class_sorted,
        skipped=sum(len(b.skipped) for b in built),
        labels=listing.labels,
        source={
            "layout": listing.layout,
            "archives": [a.to_json() for a in listing.archives],
            **listing.options,
        },
        plan=planned.options.to_json() | {"sha256": planned.digest},
        container=planned.options.container,
        writer=container(planned.options.container).library(),
        tables=tables,
        shards=tuple(map(entry_of, built)),
        content_root=columns.content_root if columns else records_root,
        kinds=kinds_in(index["flags"]),
        archive=archive,
        crop_ready=int(np.count_nonzero(index["flags"] & ImageFlag.CROP_READY)),
        columns=columns,
    )
    names = [table.name for table in tables_of(manifest)]
    for stale in TABLE_NAMES - set(names):  # left by an unfinished conversion
        (output / stale).unlink(missing_ok=True)
    for name in names:
        publish(work_folder.run / name, output / name)
    return manifest


def verify_finished(output: Path, progress: Progress) -> None:
    """Verify an already finished dataset, and remove a leftover work folder."""
    progress.note(f"{output} is complete already; verifying it")
    report = verify(output, progress=progress)
    report.raise_for_findings()
    if report.manifest and (output / WORK_FOLDER_NAME).exists():
        with mending(output, report.manifest):
            pass


@contextmanager
def mending(path: Path, manifest: Manifest) -> Iterator[WorkFolder]:
    """A context that locks a finished dataset, and at its end removes the leftovers of unfinished work."""
    with WorkFolder(path) as work_folder:
        yield work_folder
        remove_unlisted_columns(path, {file.name for file in manifest.files})
        work_folder.remove()


def _provenance(listing: Listing) -> dict[str, Any]:
    """Return the time, host, command and archives of a conversion: for information only, in no hash."""
    try:
        folder = str(Path.cwd())
    except FileNotFoundError:  # it was removed
        folder = None
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "command": sys.argv,
        "folder": folder,
        "python": sys.version.split()[0],
        "archives": [asdict(archive) for archive in listing.archives],
    }


def build_tables(
    work_folder: WorkFolder, index: Rows, built: Sequence[BuiltShard], boxes: Rows | None
) -> tuple[FileEntry, ...]:
    """Write the index and, if there are any, the boxes and the quarantine list into the run's folder."""
    tables = {INDEX_NAME: index}
    if boxes is not None:
        tables[BOXES_NAME] = _in_index_order(boxes, index)
    entries = [
        _written(work_folder, name, len(rows), (table_header(rows.dtype, len(rows)), rows.tobytes()))
        for name, rows in tables.items()
    ]
    if skipped := [asdict(image) for shard in built for image in shard.skipped]:
        entries.append(_written(work_folder, QUARANTINE_NAME, len(skipped), [canonical_json(skipped)]))
    return tuple(entries)


def _in_index_order(boxes: Rows, index: Rows) -> Rows:
    """Return the boxes in the order of the index, without those of images not in it."""
    by_key = np.argsort(index["key"], kind="stable")
    sorted_keys = index["key"][by_key]
    at = np.minimum(np.searchsorted(sorted_keys, boxes["key"]), len(sorted_keys) - 1)
    is_known = sorted_keys[at] == boxes["key"]
    rows = boxes[list(BOX_DTYPE.names or ())][is_known].astype(BOX_DTYPE)
    rows["record"] = by_key[at][is_known]
    in_order: Rows = rows[np.argsort(rows["record"], kind="stable")]
    return in_order


def _written(work_folder: WorkFolder, name: str, records: int, parts: Iterable[bytes]) -> FileEntry:
    """Write and flush a file in the run's folder; return its entry."""
    path = work_folder.run / name
    with naming(path), path.open("xb") as file:
        file.writelines(parts)
    flush_file(path)
    return FileEntry(name, path.stat().st_size, hash_file(path), records)


def shard_rows(work_folder: WorkFolder, built: Sequence[BuiltShard]) -> Iterator[Rows]:
    """Yield each shard's rows, with content digests. Raises ManifestDamaged if they changed."""

    def row_of(width: int) -> np.dtype[np.void] | None:
        row = index_row_of(width - 32, offsets=True)  # without the digest
        return None if row is None else built_row(row)

    return _rows_in(work_folder, built, row_of)


def _rows_in(work_folder: WorkFolder, built: Iterable[BuiltFile], row: RowType) -> Iterator[Rows]:
    for one in (each for each in built if each.records):  # the key width of empty shards is unknown
        path = work_folder.folder / one.rows
        yield read_table(path, FileEntry(one.rows, path.stat().st_size, one.rows_sha256, one.records), row)


def index_of(
    work_folder: WorkFolder, planned: Plan, built: Sequence[BuiltShard], *, offsets: bool = True
) -> Rows:
    """Return the index of all shards' rows. Format 1.0 has no ``offsets``."""
    index = np.zeros(sum(b.records for b in built), index_dtype(planned.key_bytes, offsets=offsets))
    names = list(index.dtype.names or ())
    start = 0
    for rows in shard_rows(work_folder, built):
        index[start : start + len(rows)] = rows["row"][names]
        start += len(rows)
    return index


def column_entries(
    work_folder: WorkFolder, schema: Schema, built: Sequence[BuiltShard], *, offsets: bool = True
) -> Iterator[ColumnEntry]:
    """Write the tables of the columns into the run's folder; yield the columns' entries."""
    for number, column in enumerate(schema):
        columns = [shard.columns[number] for shard in built]
        row, of_built = column_row(column, offsets=offsets), built_row(column_row(column))
        parts = (rows["row"] for rows in _rows_in(work_folder, columns, of_built))
        table = (part[list(row.names or ())].astype(row).tobytes() for part in parts)
        records = sum(part.records for part in columns)
        parts_of_table = chain([table_header(row, records)], table)
        yield ColumnEntry(
            column,
            _written(work_folder, table_name(column.name), records, parts_of_table),
            tuple(entry_of(part) for part in columns if part.name),
            content_root(rows["digest"].tobytes() for rows in _rows_in(work_folder, columns, of_built)),
        )


def sum_up(
    listing: Listing, built: Iterable[BuiltShard], before: Sequence[SkippedImage] = ()
) -> SkippedImages:
    """Summarise the images that were left out of the shards, or ``before``."""
    skipped, entries = [*before, *(image for shard in built for image in shard.skipped)], listing.entries
    if not skipped:
        return SkippedImages()
    keys = defaultdict(list)
    for image in skipped:
        keys[cause_of(image.reason)].append(image.key)
    left_out = np.isin(entries["key"], [image.key.encode() for image in skipped])
    labels = entries["label"]
    emptied = np.setdiff1d(labels[labels >= 0], labels[~left_out])
    causes = [SkippedCause(cause, len(found), min(found)) for cause, found in keys.items()]
    return SkippedImages(
        count=len(skipped),
        causes=tuple(sorted(causes, key=lambda one: (-one.count, one.cause))),
        emptied=tuple(listing.labels.classes[label].name for label in emptied.tolist()),
    )
