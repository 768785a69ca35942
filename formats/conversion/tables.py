"""The tables of a dataset and of its columns: built in the run's folder, then published."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from shardprep.formats.conversion.plan import Plan
from shardprep.formats.conversion.shard import BuiltColumn, BuiltShard, built_row, row_dtype
from shardprep.formats.records.labels import UNLABELLED, LabelSpace
from shardprep.formats.records.record import MAX_KEY_BYTES, content_root
from shardprep.formats.records.schema import Field
from shardprep.formats.runtime.files import flush_file, hash_file, naming, publish
from shardprep.formats.runtime.json_record import canonical_json
from shardprep.formats.runtime.work_folder import WorkFolder
from shardprep.formats.shards.columns import (
    BOX_DTYPE,
    SIDES,
    ColumnEntry,
    DatasetColumns,
    column_row,
    table_name,
)
from shardprep.formats.shards.files import FileEntry, Rows, read_table, table_header, write_rows, write_table
from shardprep.formats.shards.manifest import QUARANTINE_NAME
from shardprep.formats.shards.tables import BOXES_NAME, INDEX_NAME, index_dtype
from shardprep.formats.sources.source import Box, Listing, Source

BOXES_AT_ONCE = 1 << 15

TABLE_NAMES = (INDEX_NAME, BOXES_NAME, QUARANTINE_NAME)


@dataclass(frozen=True)
class GatheredBoxes:
    """All boxes of a split with their images' keys, 45 bytes each."""

    keys: npt.NDArray[np.bytes_]
    rows: npt.NDArray[np.void]

    @property
    def digest(self) -> str:
        """The SHA-256 of the boxes."""
        digest = hashlib.sha256(self.keys.tobytes())
        digest.update(self.rows.tobytes())
        return digest.hexdigest()

    def placed(self, index: Rows) -> npt.NDArray[np.void]:
        """Return the rows in the order of the index, without the boxes of images that are not in it."""
        by_key = np.argsort(index["key"], kind="stable")
        sorted_keys = index["key"][by_key]
        at = np.minimum(np.searchsorted(sorted_keys, self.keys), len(sorted_keys) - 1)
        rows = self.rows.copy()
        rows["record"] = by_key[at]
        known = rows[sorted_keys[at] == self.keys]
        in_order: npt.NDArray[np.void] = known[np.argsort(known["record"], kind="stable")]
        return in_order


def gather_tables(boxes: Iterator[Box], labels: LabelSpace) -> GatheredBoxes:
    """Read all boxes, so that reading errors come before the first shard is built, not after the last."""
    keys, rows = [np.zeros(0, "S1")], [np.zeros(0, BOX_DTYPE)]
    while some := list(islice(boxes, BOXES_AT_ONCE)):
        keys.append(np.array([box.key.encode() for box in some]))
        rows.append(_rows(some, labels))
    return GatheredBoxes(np.concatenate(keys), np.concatenate(rows))


def _rows(boxes: list[Box], labels: LabelSpace) -> npt.NDArray[np.void]:
    rows = np.zeros(len(boxes), BOX_DTYPE)
    rows["label"] = [labels.label_of.get(box.name, UNLABELLED) for box in boxes]
    for side in SIDES:
        rows[side] = [getattr(box, side) for box in boxes]
    return rows


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
    tables = [_write_rows(work_folder, INDEX_NAME, index)]
    if boxes is not None:
        tables.append(_write_rows(work_folder, BOXES_NAME, boxes.placed(index)))
    skipped = [{"key": s.key, "where": s.where, "reason": s.reason} for b in built for s in b.skipped]
    if skipped:
        with naming(work_folder.run / QUARANTINE_NAME), _created(work_folder, QUARANTINE_NAME) as file:
            file.write(canonical_json(skipped))
        tables.append(_flushed(work_folder.run / QUARANTINE_NAME, len(skipped)))
    return tuple(tables)


def publish_tables(work_folder: WorkFolder, names: Collection[str]) -> None:
    """Publish those of the built tables."""
    for name in names:
        publish(work_folder.run / name, work_folder.output / name)


def remove_stale(output: Path, names: Collection[str]) -> None:
    """Remove tables of an earlier, unfinished conversion that this one does not have."""
    for name in set(TABLE_NAMES) - set(names):
        (output / name).unlink(missing_ok=True)


def shard_rows(work_folder: WorkFolder, built: Sequence[BuiltShard]) -> Iterator[Rows]:
    """Yield each shard's rows with the records' content digests. Raises ManifestDamaged if they changed."""
    for shard in (each for each in built if each.records):  # without rows the columns are unknown
        path = work_folder.folder / (shard.name + ".rows")
        entry = FileEntry(path.name, path.stat().st_size, shard.rows_sha256, shard.records)
        yield read_table(path, entry, _built_row)


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


def _write_rows(work_folder: WorkFolder, name: str, rows: Rows) -> FileEntry:
    with naming(work_folder.run / name), _created(work_folder, name) as file:
        write_table(file, rows)
    return _flushed(work_folder.run / name, len(rows))


def _created(work_folder: WorkFolder, name: str) -> BinaryIO:
    return (work_folder.run / name).open("xb")


def _flushed(path: Path, records: int) -> FileEntry:
    flush_file(path)
    return FileEntry(path.name, path.stat().st_size, hash_file(path), records)


def gathered_boxes(source: Source, split: str, listing: Listing) -> GatheredBoxes | None:
    """Read all boxes of a split; None if it has none."""
    boxes = source.boxes(split)
    return None if boxes is None else gather_tables(boxes, listing.labels)


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
    path = work_folder.run / table_name(field.name)
    row = column_row(field, offsets=offsets)
    records = sum(part.records for part in built)
    with naming(path), path.open("xb") as file:
        file.write(table_header(row, records))
        for rows in _column_rows(work_folder, field, built):
            write_rows(file, rows["row"][list(row.names or ())].astype(row))
    flush_file(path)
    shards = (part.shard for part in built)
    digests = (rows["digest"].tobytes() for rows in _column_rows(work_folder, field, built))
    return ColumnEntry(
        field,
        FileEntry(path.name, path.stat().st_size, hash_file(path), records),
        tuple(shard for shard in shards if shard),
        content_root(digests),
    )


def _column_rows(work_folder: WorkFolder, field: Field, built: Sequence[BuiltColumn]) -> Iterator[Rows]:
    """Yield a column's rows of each shard. Raises ManifestDamaged if they changed."""
    row = built_row(field)
    for column in built:
        path = work_folder.folder / column.rows
        entry = FileEntry(path.name, path.stat().st_size, column.rows_sha256, column.records)
        if column.records:
            yield read_table(path, entry, lambda width: row if width == row.itemsize else None)
