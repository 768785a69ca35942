"""The end of a conversion: tables, then provenance, then the manifest that makes them a dataset."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from .box_table import GatheredBoxes
from .build import BuiltShard
from .canonical import canonical_json
from .content_root import content_root
from .errors import DataError, OperationError
from .manifest import MANIFEST_NAME, PROVENANCE_NAME, FileEntry, Manifest
from .plan import Plan
from .publish import publish_bytes
from .shard import container
from .source import Listing
from .tables import build_tables, publish_tables, remove_stale, shard_rows
from .workplace import Workplace


def finish(
    workplace: Workplace,
    planned: Plan,
    listing: Listing,
    built: Sequence[BuiltShard],
    boxes: GatheredBoxes | None,
) -> Manifest:
    """Publish everything but the shards, the manifest last, and remove the workplace."""
    output = workplace.output
    if len(built) != len(planned.shards):
        raise OperationError(f"{len(built)} shards were built of {len(planned.shards)}", path=output)
    if not any(b.records for b in built):
        raise DataError("no image of the source is intact", path=output)
    tables = build_tables(workplace, planned, built, boxes)
    names = [table.name for table in tables]
    remove_stale(output, names)
    publish_tables(workplace, names)
    manifest = _manifest(workplace, planned, listing, built, tables)
    publish_bytes(output / PROVENANCE_NAME, canonical_json(_provenance(listing)), workplace.folder)
    publish_bytes(output / MANIFEST_NAME, manifest.to_bytes(), workplace.folder)
    workplace.remove()
    return manifest


def _manifest(
    workplace: Workplace,
    planned: Plan,
    listing: Listing,
    built: Sequence[BuiltShard],
    tables: tuple[FileEntry, ...],
) -> Manifest:
    digests: Iterable[bytes] = (r["digest"].tobytes() for r in shard_rows(workplace, built))
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


def _provenance(listing: Listing) -> dict[str, Any]:
    """When, where, how, and what was checked of the archives: for people only, and in no hash."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "command": sys.argv,
        "python": sys.version.split()[0],
        "archives": [asdict(archive) for archive in listing.archives],
    }
