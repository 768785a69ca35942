"""The end of a conversion: tables, provenance and, last, the manifest."""

from __future__ import annotations

import socket
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from shardprep.formats.conversion.plan import Plan
from shardprep.formats.conversion.prepare import PreparedSplit
from shardprep.formats.conversion.shard import (
    BuiltColumn,
    BuiltFile,
    BuiltShard,
    SkippedImage,
    built_row,
    entry_of,
    row_dtype,
)
from shardprep.formats.errors import DataError
from shardprep.formats.images.info import ImageFlag, cause_of
from shardprep.formats.records.labels import LabelSpace
from shardprep.formats.records.record import MAX_KEY_BYTES, content_root
from shardprep.formats.records.schema import Field, Schema
from shardprep.formats.runtime.files import flush_file, hash_file, naming, publish, publish_bytes
from shardprep.formats.runtime.json_record import canonical_json
from shardprep.formats.runtime.progress import Progress
from shardprep.formats.runtime.sizes import count_of
from shardprep.formats.runtime.work_folder import WORK_FOLDER_NAME, WorkFolder
from shardprep.formats.shards.columns import (
    BOX_DTYPE,
    ColumnEntry,
    DatasetColumns,
    column_row,
    remove_unlisted_columns,
    table_name,
)
from shardprep.formats.shards.in_place import BLOCK_BYTES, IndexedArchive, link_archive
from shardprep.formats.shards.manifest import MANIFEST_NAME, PROVENANCE_NAME, QUARANTINE_NAME, Manifest
from shardprep.formats.shards.read import ARCHIVE_NAME, FileEntry, Rows, container, read_table, table_header
from shardprep.formats.shards.tables import BOXES_NAME, INDEX_NAME, index_dtype, kinds_in
from shardprep.formats.sources.source import Entries, Listing
from shardprep.formats.verification.levels import verify_folder

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
    names = [*(table.name for table in tables), *(column.table.name for column in manifest.column_entries)]
    for stale in TABLE_NAMES - set(names):  # left by an unfinished conversion
        (output / stale).unlink(missing_ok=True)
    publish_tables(work_folder, names)
    return manifest


def verify_finished(output: Path, progress: Progress) -> None:
    """Verify an already finished dataset, and remove a leftover work folder."""
    progress.note(f"{output} is complete already; verifying it")
    report = verify_folder(output, "full", None, None, progress)
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


def publish_tables(work_folder: WorkFolder, names: Collection[str]) -> None:
    for name in names:
        publish(work_folder.run / name, work_folder.output / name)


def shard_rows(work_folder: WorkFolder, built: Sequence[BuiltShard]) -> Iterator[Rows]:
    """Yield each shard's rows, with content digests. Raises ManifestDamaged if they changed."""

    def row_of(width: int) -> np.dtype[np.void] | None:
        key_bytes = width - row_dtype(1).itemsize + 1
        return row_dtype(key_bytes) if 1 <= key_bytes <= MAX_KEY_BYTES else None

    return _rows_in(work_folder, built, row_of)


def _rows_in(
    work_folder: WorkFolder, built: Iterable[BuiltFile], row_of: Callable[[int], np.dtype[np.void] | None]
) -> Iterator[Rows]:
    for one in (each for each in built if each.records):  # the key width of empty shards is unknown
        path = work_folder.folder / one.rows
        yield read_table(path, FileEntry(one.rows, path.stat().st_size, one.rows_sha256, one.records), row_of)


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
    for number, field in enumerate(schema):
        yield _column_entry(work_folder, field, [shard.columns[number] for shard in built], offsets)


def _column_entry(
    work_folder: WorkFolder, field: Field, built: Sequence[BuiltColumn], offsets: bool
) -> ColumnEntry:
    name, row, of_built = table_name(field.name), column_row(field, offsets=offsets), built_row(field)
    records = sum(part.records for part in built)

    def parts() -> Iterator[Rows]:
        return _rows_in(work_folder, built, lambda width: of_built if width == of_built.itemsize else None)

    def table() -> Iterator[bytes]:
        yield table_header(row, records)
        for rows in parts():
            yield rows["row"][list(row.names or ())].astype(row).tobytes()

    return ColumnEntry(
        field,
        _written(work_folder, name, records, table()),
        tuple(entry_of(part) for part in built if part.name),
        content_root(rows["digest"].tobytes() for rows in parts()),
    )


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


def sum_up(skipped: Sequence[SkippedImage], entries: Entries, labels: LabelSpace) -> SkippedImages:
    """Summarise the images that were left out of ``entries``."""
    if not skipped:
        return SkippedImages()
    keys = defaultdict(list)
    for image in skipped:
        keys[cause_of(image.reason)].append(image.key)
    left_out = np.isin(entries["key"], [image.key.encode() for image in skipped])
    before, after = entries["label"], entries["label"][~left_out]
    emptied = np.setdiff1d(before[before >= 0], after)
    causes = [SkippedCause(cause, len(found), min(found)) for cause, found in keys.items()]
    return SkippedImages(
        count=len(skipped),
        causes=tuple(sorted(causes, key=lambda one: (-one.count, one.cause))),
        emptied=tuple(labels.classes[label].name for label in emptied.tolist()),
    )
