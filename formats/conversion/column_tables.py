"""The tables of a dataset's columns, and what the manifest says of the columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardprep.formats.columns.column_entry import ColumnEntry, DatasetColumns, column_row, table_name
from shardprep.formats.columns.schema import Field
from shardprep.formats.containers.published_file import FileEntry
from shardprep.formats.containers.table import Rows, read_table, table_header, write_rows
from shardprep.formats.conversion.building.built_shard import BuiltShard
from shardprep.formats.conversion.building.column_of_shard import built_row
from shardprep.formats.conversion.building.plan import Plan
from shardprep.formats.conversion.building.work_folder import WorkFolder
from shardprep.formats.records.record import content_root
from shardprep.formats.system.atomic_write import flush_file, hash_file
from shardprep.formats.system.regular_file import naming


def build_columns(
    work_folder: WorkFolder, planned: Plan, built: Sequence[BuiltShard], records_root: str
) -> DatasetColumns | None:
    """Write the columns' tables into the run's folder; return the columns, None if there are none."""
    if not len(planned.schema) and planned.has_images:
        return None
    entries = [build_column(work_folder, planned, field.name, built) for field in planned.schema]
    return DatasetColumns(tuple(entries), records_root, planned.has_images)


def build_column(
    work_folder: WorkFolder, planned: Plan, name: str, built: Sequence[BuiltShard]
) -> ColumnEntry:
    """Write the table of the column ``name`` into the run's folder; return the column."""
    field, number = planned.schema[name], planned.schema.names.index(name)
    path = work_folder.run / table_name(field.name)
    records = sum(shard.records for shard in built)
    with naming(path), path.open("xb") as file:
        file.write(table_header(column_row(field), records))
        for rows in _shard_rows(work_folder, field, number, built):
            write_rows(file, rows["row"])
    flush_file(path)
    shards = (shard.columns[number].shard for shard in built)
    digests = (rows["digest"].tobytes() for rows in _shard_rows(work_folder, field, number, built))
    return ColumnEntry(
        field,
        FileEntry(path.name, path.stat().st_size, hash_file(path), records),
        tuple(shard for shard in shards if shard),
        content_root(digests),
    )


def _shard_rows(
    work_folder: WorkFolder, field: Field, number: int, built: Sequence[BuiltShard]
) -> Iterator[Rows]:
    """Yield a column's rows of each shard. Raises ManifestDamaged if they changed."""
    row = built_row(field)
    for shard in built:
        column = shard.columns[number]
        path = work_folder.folder / column.rows
        entry = FileEntry(path.name, path.stat().st_size, column.rows_sha256, column.records)
        if column.records:
            yield read_table(path, entry, lambda width: row if width == row.itemsize else None)
