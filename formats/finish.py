"""The end of a conversion: tables, then provenance, then the manifest that makes them a dataset."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .build import BuiltShard
from .canonical import canonical_json
from .content_root import content_root
from .errors import DataError, OperationError
from .index import BOX_DTYPE, BOXES_NAME, INDEX_NAME, Rows, index_dtype, map_table, write_table
from .labels import UNLABELLED, LabelSpace
from .manifest import MANIFEST_NAME, PROVENANCE_NAME, QUARANTINE_NAME, FileEntry, Manifest
from .plan import Plan
from .publish import hash_file, publish_bytes, publishing
from .shard import container
from .source import Box, Listing
from .workplace import Workplace

BOXES_AT_ONCE = 1 << 15


def finish(
    workplace: Workplace,
    planned: Plan,
    listing: Listing,
    built: Sequence[BuiltShard],
    boxes: Iterator[Box] | None,
) -> Manifest:
    """Publish everything but the shards, the manifest last, and remove the workplace."""
    if len(built) != len(planned.shards):
        raise OperationError(
            f"{len(built)} shards were built of {len(planned.shards)}", path=workplace.output
        )
    if not any(b.records for b in built):
        raise DataError("no image of the source is intact", path=workplace.output)
    tables = publish_tables(workplace, planned, listing.labels, built, boxes)
    manifest = _manifest(workplace, planned, listing, built, tables)
    publish_bytes(workplace.output / PROVENANCE_NAME, canonical_json(_provenance()), workplace.folder)
    publish_bytes(workplace.output / MANIFEST_NAME, manifest.to_bytes(), workplace.folder)
    workplace.remove()
    return manifest


def publish_tables(
    workplace: Workplace,
    planned: Plan,
    labels: LabelSpace,
    built: Sequence[BuiltShard],
    boxes: Iterator[Box] | None,
) -> tuple[FileEntry, ...]:
    """Publish the index, the boxes and the quarantine list, as far as there are any."""
    index = _index(workplace, planned, built)
    tables = [_publish_table(workplace, INDEX_NAME, index)]
    if boxes is not None:
        tables.append(_publish_table(workplace, BOXES_NAME, _box_table(boxes, index, labels)))
    skipped = [s for b in built for s in b.skipped]
    if skipped:
        rows = [{"key": s.key, "where": s.where, "reason": s.reason} for s in skipped]
        publish_bytes(workplace.output / QUARANTINE_NAME, canonical_json(rows), workplace.folder)
        tables.append(_entry(workplace.output / QUARANTINE_NAME, len(skipped)))
    return tuple(tables)


def _publish_table(workplace: Workplace, name: str, rows: Rows) -> FileEntry:
    with publishing(workplace.output / name, workplace.folder) as file:
        write_table(file, rows)
    return _entry(workplace.output / name, len(rows))


def _entry(path: Path, records: int) -> FileEntry:
    return FileEntry(path.name, path.stat().st_size, hash_file(path), records)


def _shard_rows(workplace: Workplace, built: Sequence[BuiltShard]) -> Iterator[Rows]:
    for shard in built:
        yield map_table(workplace.folder / (shard.name + ".rows"))


def _index(workplace: Workplace, planned: Plan, built: Sequence[BuiltShard]) -> Rows:
    index = np.zeros(sum(b.records for b in built), index_dtype(planned.key_bytes))
    start = 0
    for rows in _shard_rows(workplace, built):
        index[start : start + len(rows)] = rows["row"]
        start += len(rows)
    return index


def _box_table(boxes: Iterator[Box], index: Rows, labels: LabelSpace) -> npt.NDArray[np.void]:
    by_key = np.argsort(index["key"], kind="stable")
    sorted_keys = index["key"][by_key]
    parts = [np.zeros(0, BOX_DTYPE)]
    while some := list(islice(boxes, BOXES_AT_ONCE)):
        parts.append(_box_rows(some, sorted_keys, by_key, labels))
    table = np.concatenate(parts)
    in_order: npt.NDArray[np.void] = table[np.argsort(table["record"], kind="stable")]
    return in_order


def _box_rows(
    boxes: list[Box], sorted_keys: npt.NDArray[np.bytes_], by_key: npt.NDArray[np.intp], labels: LabelSpace
) -> npt.NDArray[np.void]:
    """Boxes as rows; a box of an image that is not in the dataset is left out."""
    keys = np.array([b.key.encode() for b in boxes])
    at = np.minimum(np.searchsorted(sorted_keys, keys), len(sorted_keys) - 1)
    rows = np.zeros(len(boxes), BOX_DTYPE)
    rows["record"] = by_key[at]
    rows["label"] = [labels.label_of.get(b.name, UNLABELLED) for b in boxes]
    for side in ("x_min", "y_min", "x_max", "y_max"):
        rows[side] = [getattr(b, side) for b in boxes]
    known: npt.NDArray[np.void] = rows[sorted_keys[at] == keys]
    return known


def _manifest(
    workplace: Workplace,
    planned: Plan,
    listing: Listing,
    built: Sequence[BuiltShard],
    tables: tuple[FileEntry, ...],
) -> Manifest:
    digests: Iterable[bytes] = (r["digest"].tobytes() for r in _shard_rows(workplace, built))
    return Manifest(
        split=planned.split,
        records=sum(b.records for b in built),
        image_bytes=sum(b.image_bytes for b in built),
        partial=listing.expected not in (None, len(planned.order)),
        class_sorted=planned.class_sorted,
        skipped=sum(len(b.skipped) for b in built),
        labels=listing.labels,
        source={"layout": listing.layout, "archives": [a.to_json() for a in listing.archives]},
        plan=planned.describe(),
        container=planned.options.container,
        writer=container(planned.options.container).library(),
        tables=tables,
        shards=tuple(FileEntry(b.name, b.size, b.sha256, b.records) for b in built),
        content_root=content_root(digests),
    )


def _provenance() -> dict[str, Any]:
    """When, where and how: for people only, and in no hash."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "command": sys.argv,
        "folder": os.fspath(Path.cwd()),
        "python": sys.version.split()[0],
    }
