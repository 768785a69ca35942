"""The end of a conversion: tables, provenance and, last, the manifest."""

from __future__ import annotations

import socket
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from shardprep.formats.conversion.plan import Plan
from shardprep.formats.conversion.prepare import GatheredBoxes, PreparedSplit
from shardprep.formats.conversion.shard import BuiltColumn, BuiltShard, SkippedImage, built_row, row_dtype
from shardprep.formats.errors import DataError, OperationError
from shardprep.formats.images.info import ImageFlag, cause_of
from shardprep.formats.records.labels import LabelSpace
from shardprep.formats.records.record import MAX_KEY_BYTES, content_root
from shardprep.formats.records.schema import Field
from shardprep.formats.runtime.files import flush_file, hash_file, naming, publish, publish_bytes
from shardprep.formats.runtime.json_record import canonical_json
from shardprep.formats.runtime.progress import Progress
from shardprep.formats.runtime.work_folder import WORK_FOLDER_NAME, WorkFolder
from shardprep.formats.shards.columns import (
    ColumnEntry,
    DatasetColumns,
    column_row,
    remove_unlisted_columns,
    table_name,
)
from shardprep.formats.shards.files import FileEntry, Rows, read_table, table_header, write_rows, write_table
from shardprep.formats.shards.in_place import ARCHIVE_NAME, BLOCK_BYTES, IndexedArchive, link_archive
from shardprep.formats.shards.manifest import MANIFEST_NAME, PROVENANCE_NAME, QUARANTINE_NAME, Manifest
from shardprep.formats.shards.read import IN_PLACE, container
from shardprep.formats.shards.tables import BOXES_NAME, INDEX_NAME, index_dtype, kinds_in
from shardprep.formats.sources.source import Entries, Listing
from shardprep.formats.verification.levels import verify_folder

TABLE_NAMES = {INDEX_NAME, BOXES_NAME, QUARANTINE_NAME}


def finish(work_folder: WorkFolder, prepared: PreparedSplit, built: Sequence[BuiltShard]) -> Manifest:
    """Publish the tables, the provenance and, last, the manifest; then remove the work folder."""
    output, listing = work_folder.output, prepared.listing
    manifest = gather(work_folder, prepared, built)
    if manifest.archive and (archive := listing.reader.archive):
        link_archive(output / ARCHIVE_NAME, archive.path, work_folder.run)
    publish_bytes(output / PROVENANCE_NAME, canonical_json(_provenance(listing)), work_folder.run)
    publish_bytes(output / MANIFEST_NAME, manifest.to_bytes(), work_folder.run)
    work_folder.remove()
    return manifest


def gather(work_folder: WorkFolder, prepared: PreparedSplit, built: Sequence[BuiltShard]) -> Manifest:
    """Publish the tables of all shards; return the manifest, which is not published. Raises DataError."""
    output, planned, listing = work_folder.output, prepared.planned, prepared.listing
    if len(built) != len(planned.shards):
        raise OperationError(f"{len(built)} shards were built of {len(planned.shards)}", path=output)
    if not any(b.records for b in built):
        raise DataError("the source has no intact image", path=output)
    tables = build_tables(work_folder, planned, built, prepared.boxes)
    digests: Iterable[bytes] = (r["digest"].tobytes() for r in shard_rows(work_folder, built))
    records_root = content_root(digests)
    columns = build_columns(work_folder, planned, built, records_root)
    flags = [r["row"]["flags"] for r in shard_rows(work_folder, built)]
    manifest = Manifest(
        split=planned.split,
        records=sum(b.records for b in built),
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
        plan=planned.describe(),
        container=planned.options.container,
        writer=container(planned.options.container).library(),
        tables=tables,
        shards=tuple(FileEntry(b.name, b.size, b.sha256, b.records) for b in built),
        content_root=columns.content_root if columns else records_root,
        kinds=kinds_in(np.array([np.bitwise_or.reduce(rows) for rows in flags], np.uint16)),
        archive=_archive(planned, listing, built),
        crop_ready=sum(int(np.count_nonzero(rows & ImageFlag.CROP_READY)) for rows in flags),
        columns=columns,
    )
    names = [table.name for table in tables]
    names += [column.table.name for column in (columns.entries if columns else ())]
    for stale in TABLE_NAMES - set(names):  # of an earlier, unfinished conversion
        (output / stale).unlink(missing_ok=True)
    publish_tables(work_folder, names)
    return manifest


def verify_finished(output: Path, progress: Progress) -> None:
    """Verify a dataset that was found finished, and remove a work folder that is left of it.

    Raises DataError if it is damaged, OutputBusy, OSError.
    """
    progress.note(f"{output} is complete already; verifying it")
    report = verify_folder(output, level="full", progress=progress)
    report.raise_for_findings()
    if (output / WORK_FOLDER_NAME).exists():
        with WorkFolder(output) as work_folder:
            if report.manifest:
                remove_unlisted_columns(output, {file.name for file in report.manifest.files})
            work_folder.remove()


def _archive(planned: Plan, listing: Listing, built: Sequence[BuiltShard]) -> IndexedArchive | None:
    """Return the archive that keeps the images; None where the shards have them."""
    archive = listing.reader.archive
    if planned.options.container != IN_PLACE or archive is None:
        return None
    sizes = tuple(region.size for region in planned.regions(archive.size))
    digests = tuple(shard.region_sha256 for shard in built)
    return IndexedArchive(archive.path.name, sizes, digests, BLOCK_BYTES)


def _provenance(listing: Listing) -> dict[str, Any]:
    """Return time, host, command, its folder and checked archives: for information only, and in no hash."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "command": sys.argv,
        "folder": _current_folder(),
        "python": sys.version.split()[0],
        "archives": [asdict(archive) for archive in listing.archives],
    }


def _current_folder() -> str | None:
    try:
        return str(Path.cwd())
    except FileNotFoundError:  # it was removed
        return None


def build_tables(
    work_folder: WorkFolder,
    planned: Plan,
    built: Sequence[BuiltShard],
    boxes: GatheredBoxes | None,
    *,
    offsets: bool = True,
) -> tuple[FileEntry, ...]:
    """Write the index and, if there are any, boxes and quarantine list into the run's folder.

    Without ``offsets`` the index is that of format 1.0.
    """
    index = _index(work_folder, planned, built, offsets=offsets)
    rows = {INDEX_NAME: index} | ({} if boxes is None else {BOXES_NAME: boxes.placed(index)})
    tables = []
    for name, table in rows.items():
        with _built(work_folder, name) as file:
            write_table(file, table)
        tables.append(_entry_of(work_folder, name, len(table)))
    skipped = [{"key": s.key, "where": s.where, "reason": s.reason} for b in built for s in b.skipped]
    if skipped:
        with _built(work_folder, QUARANTINE_NAME) as file:
            file.write(canonical_json(skipped))
        tables.append(_entry_of(work_folder, QUARANTINE_NAME, len(skipped)))
    return tuple(tables)


@contextmanager
def _built(work_folder: WorkFolder, name: str) -> Iterator[BinaryIO]:
    """Make a file in the run's folder, which is flushed at the end."""
    path = work_folder.run / name
    with naming(path), path.open("xb") as file:
        yield file
    flush_file(path)


def _entry_of(work_folder: WorkFolder, name: str, records: int) -> FileEntry:
    path = work_folder.run / name
    return FileEntry(name, path.stat().st_size, hash_file(path), records)


def publish_tables(work_folder: WorkFolder, names: Collection[str]) -> None:
    """Publish those of the built tables."""
    for name in names:
        publish(work_folder.run / name, work_folder.output / name)


def shard_rows(work_folder: WorkFolder, built: Sequence[BuiltShard]) -> Iterator[Rows]:
    """Yield each shard's rows with the records' content digests. Raises ManifestDamaged if they changed."""
    for shard in (each for each in built if each.records):  # without rows the columns are unknown
        path = work_folder.folder / (shard.name + ".rows")
        yield _unchanged_rows(path, shard.rows_sha256, shard.records, _built_row)


def _unchanged_rows(
    path: Path, sha256: str, records: int, row_of: Callable[[int], np.dtype[np.void] | None]
) -> Rows:
    return read_table(path, FileEntry(path.name, path.stat().st_size, sha256, records), row_of)


def _built_row(width: int) -> np.dtype[np.void] | None:
    key_bytes = width - row_dtype(1).itemsize + 1
    return row_dtype(key_bytes) if 1 <= key_bytes <= MAX_KEY_BYTES else None


def _index(work_folder: WorkFolder, planned: Plan, built: Sequence[BuiltShard], *, offsets: bool) -> Rows:
    index = np.zeros(sum(b.records for b in built), index_dtype(planned.key_bytes, offsets=offsets))
    names = list(index.dtype.names or ())
    start = 0
    for rows in shard_rows(work_folder, built):
        index[start : start + len(rows)] = rows["row"][names]
        start += len(rows)
    return index


def build_columns(
    work_folder: WorkFolder, planned: Plan, built: Sequence[BuiltShard], records_root: str
) -> DatasetColumns | None:
    """Write the columns' tables into the run's folder; return the columns, None if there are none."""
    if not len(planned.schema) and planned.has_images:
        return None
    entries = [build_column(work_folder, planned, field.name, built) for field in planned.schema]
    return DatasetColumns(tuple(entries), records_root, planned.has_images)


def build_column(
    work_folder: WorkFolder, planned: Plan, name: str, built: Sequence[BuiltShard], *, offsets: bool = True
) -> ColumnEntry:
    """Write the table of the column ``name`` into the run's folder; return the column."""
    number = planned.schema.names.index(name)
    parts = [shard.columns[number] for shard in built]
    return column_entry(work_folder, planned.schema[name], parts, offsets=offsets)


def column_entry(
    work_folder: WorkFolder, field: Field, built: Sequence[BuiltColumn], *, offsets: bool
) -> ColumnEntry:
    """Write the table of a column into the run's folder, of its parts in order; return the column.

    Without ``offsets`` the table is that of format 1.0.
    """
    name, row = table_name(field.name), column_row(field, offsets=offsets)
    records = sum(part.records for part in built)
    with _built(work_folder, name) as file:
        file.write(table_header(row, records))
        for rows in _column_rows(work_folder, field, built):
            write_rows(file, rows["row"][list(row.names or ())].astype(row))
    shards = (part.shard for part in built)
    digests = (rows["digest"].tobytes() for rows in _column_rows(work_folder, field, built))
    return ColumnEntry(
        field,
        _entry_of(work_folder, name, records),
        tuple(shard for shard in shards if shard),
        content_root(digests),
    )


def _column_rows(work_folder: WorkFolder, field: Field, built: Sequence[BuiltColumn]) -> Iterator[Rows]:
    """Yield a column's rows of each shard. Raises ManifestDamaged if they changed."""
    row = built_row(field)
    for column in (each for each in built if each.records):
        path = work_folder.folder / column.rows
        yield _unchanged_rows(
            path, column.rows_sha256, column.records, lambda width: row if width == row.itemsize else None
        )


@dataclass(frozen=True, slots=True)
class SkippedCause:
    """A cause: ``count`` images, and the key of the ``first``."""

    cause: str
    count: int
    first: str

    def __str__(self) -> str:
        return f"{self.count:,} {self.cause} (first: {self.first})"


@dataclass(frozen=True)
class SkippedImages:
    """The images that were left out.

    ``count`` is their number, and ``causes`` has a :class:`SkippedCause` for each cause, the most frequent
    first. ``emptied`` are the names of the classes that have no image left: they keep their labels.
    """

    count: int = 0
    causes: tuple[SkippedCause, ...] = ()
    emptied: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return "12 images: 7 not an image (first: a/b.txt), 5 truncated (first: a/c.jpg)"."""
        images = f"{self.count:,} image" + ("s" if self.count != 1 else "")
        return f"{images}: {', '.join(map(str, self.causes))}" if self.causes else images


def sum_up(skipped: Sequence[SkippedImage], entries: Entries, labels: LabelSpace) -> SkippedImages:
    """Return the summary of the images that were left out of ``entries``."""
    if not skipped:
        return SkippedImages()
    keys = defaultdict(list)
    for image in skipped:
        keys[cause_of(image.reason)].append(image.key)
    causes = [SkippedCause(cause, len(found), min(found)) for cause, found in keys.items()]
    return SkippedImages(
        count=len(skipped),
        causes=tuple(sorted(causes, key=lambda one: (-one.count, one.cause))),
        emptied=_emptied({image.key.encode() for image in skipped}, entries, labels),
    )


def _emptied(keys: set[bytes], entries: Entries, labels: LabelSpace) -> tuple[str, ...]:
    """Return the classes whose entries have no other keys."""
    is_left_out = np.fromiter((key in keys for key in entries["key"].tolist()), bool, len(entries))
    before, after = entries["label"], entries["label"][~is_left_out]
    gone = np.setdiff1d(before[before >= 0], after)
    return tuple(labels.classes[label].name for label in gone.tolist())
