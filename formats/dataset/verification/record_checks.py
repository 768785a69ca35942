"""The checks of all files that hold records: the shards, and the files of the columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from shardprep.formats.columns.column_entry import ColumnEntry
from shardprep.formats.containers.archive import Region
from shardprep.formats.containers.table import Rows
from shardprep.formats.dataset.manifest import Manifest

from .check import Check
from .column_check import ColumnShardCheck, ColumnTableCheck
from .report import Report
from .shard_check import ShardCheck


@dataclass
class KnownTables:
    """The tables that are intact: the index, and the lengths of each column of varying sizes by its name."""

    index: Rows | None = None
    columns: dict[str, Rows | None] = field(default_factory=dict)

    @property
    def keys(self) -> npt.NDArray[np.bytes_] | None:
        return None if self.index is None else np.ascontiguousarray(self.index["key"])


def record_checks(report: Report, manifest: Manifest, tables: KnownTables) -> dict[str, Check]:
    """Return the check of each file with records, by the file's name."""
    keys = tables.keys
    checks = list(_of_shards(report, manifest, tables.index))
    for entry in manifest.columns.entries if manifest.columns else ():
        checks += _of_column(report, manifest, entry, keys, tables.columns.get(entry.table.name))
    return {check.path.name: check for check in checks}


def _of_shards(report: Report, manifest: Manifest, index: Rows | None) -> Iterator[Check]:
    regions = regions_of(manifest)
    for number, (shard, part) in enumerate(zip(manifest.shards, _parts(manifest), strict=True)):
        yield ShardCheck(
            path=report.dataset / shard.name,
            records=shard.records,
            sha256=shard.sha256,
            decode=report.level == "decode",
            number=number,
            container=manifest.container,
            rows=None if index is None else index[part],
            has_images=manifest.has_images,
            region=regions.get(shard.name),
        )


def regions_of(manifest: Manifest) -> dict[str, Region]:
    """Return the region of the archive that each shard's images are in, by its name; empty without one."""
    archive, names = manifest.archive, (shard.name for shard in manifest.shards)
    return dict(zip(names, archive.regions, strict=True)) if archive else {}


def _of_column(
    report: Report,
    manifest: Manifest,
    entry: ColumnEntry,
    keys: npt.NDArray[np.bytes_] | None,
    rows: Rows | None,
) -> Iterator[Check]:
    decode, table = report.level == "decode", entry.table
    if entry.field.is_fixed:
        path = report.dataset / table.name
        yield ColumnTableCheck(path, table.records, table.sha256, decode, entry.field, keys)
    for shard, part in zip(entry.shards, _parts(manifest), strict=False):
        yield ColumnShardCheck(
            path=report.dataset / shard.name,
            records=shard.records,
            sha256=shard.sha256,
            decode=decode,
            field=entry.field,
            keys=None if keys is None else keys[part],
            container=manifest.container,
            rows=None if rows is None else rows[part],
        )


def _parts(manifest: Manifest) -> list[slice]:
    """The record numbers of each shard."""
    ends = list(accumulate(shard.records for shard in manifest.shards))
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
