"""The tables beside the shards: built in the workplace, published when they are what they should be."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from .box_table import GatheredBoxes
from .build import BuiltShard
from .canonical import canonical_json
from .index import BOXES_NAME, INDEX_NAME, Rows, index_dtype, map_table, write_table
from .manifest import QUARANTINE_NAME, FileEntry
from .plan import Plan
from .publish import flush_file, hash_file, publish
from .workplace import Workplace

TABLE_NAMES = (INDEX_NAME, BOXES_NAME, QUARANTINE_NAME)


def build_tables(
    workplace: Workplace, planned: Plan, built: Sequence[BuiltShard], boxes: GatheredBoxes | None
) -> tuple[FileEntry, ...]:
    """Write index, boxes and quarantine list, as far as there are any, into the workplace."""
    index = _index(workplace, planned, built)
    tables = [_write_rows(workplace, INDEX_NAME, index)]
    if boxes is not None:
        tables.append(_write_rows(workplace, BOXES_NAME, boxes.placed(index)))
    skipped = [{"key": s.key, "where": s.where, "reason": s.reason} for b in built for s in b.skipped]
    if skipped:
        with _created(workplace, QUARANTINE_NAME) as file:
            file.write(canonical_json(skipped))
        tables.append(_flushed(workplace.folder / QUARANTINE_NAME, len(skipped)))
    return tuple(tables)


def publish_tables(workplace: Workplace, names: Collection[str]) -> None:
    """Publish these of the tables that were built."""
    for name in names:
        publish(workplace.folder / name, workplace.output / name)


def remove_stale(output: Path, names: Collection[str]) -> None:
    """Remove tables that an earlier, unfinished conversion left and this one does not have."""
    for name in set(TABLE_NAMES) - set(names):
        (output / name).unlink(missing_ok=True)


def shard_rows(workplace: Workplace, built: Sequence[BuiltShard]) -> Iterator[Rows]:
    """The rows of each shard, with the records' content digests."""
    for shard in built:
        yield map_table(workplace.folder / (shard.name + ".rows"))


def _index(workplace: Workplace, planned: Plan, built: Sequence[BuiltShard]) -> Rows:
    index = np.zeros(sum(b.records for b in built), index_dtype(planned.key_bytes))
    start = 0
    for rows in shard_rows(workplace, built):
        index[start : start + len(rows)] = rows["row"]
        start += len(rows)
    return index


def _write_rows(workplace: Workplace, name: str, rows: Rows) -> FileEntry:
    with _created(workplace, name) as file:
        write_table(file, rows)
    return _flushed(workplace.folder / name, len(rows))


def _created(workplace: Workplace, name: str) -> BinaryIO:
    path = workplace.folder / name
    path.unlink(missing_ok=True)
    return path.open("xb")


def _flushed(path: Path, records: int) -> FileEntry:
    flush_file(path)
    return FileEntry(path.name, path.stat().st_size, hash_file(path), records)
