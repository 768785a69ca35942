"""The end of a conversion: tables, provenance and, last, the manifest."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from shardprep.formats.columns.unlisted_columns import remove_unlisted_columns
from shardprep.formats.containers.archive import ARCHIVE_NAME, IndexedArchive, link_archive
from shardprep.formats.containers.blocks import BLOCK_BYTES
from shardprep.formats.containers.published_file import FileEntry
from shardprep.formats.containers.registry import IN_PLACE, container
from shardprep.formats.conversion.building.built_shard import BuiltShard
from shardprep.formats.conversion.building.plan import Plan
from shardprep.formats.conversion.building.work_folder import WorkFolder
from shardprep.formats.dataset.index import kinds_in
from shardprep.formats.dataset.manifest import MANIFEST_NAME, PROVENANCE_NAME, WORK_FOLDER_NAME, Manifest
from shardprep.formats.dataset.verification.verify import verify
from shardprep.formats.errors import DataError, OperationError
from shardprep.formats.images.kinds.image_info import ImageFlag
from shardprep.formats.progress import Progress
from shardprep.formats.records.canonical_json import canonical_json
from shardprep.formats.records.record import content_root
from shardprep.formats.sources.listing.source import Listing
from shardprep.formats.system.atomic_write import publish_bytes

from .column_tables import build_columns
from .tables import (
    GatheredBoxes,
    build_tables,
    publish_tables,
    remove_stale,
    shard_rows,
)


def finish(
    work_folder: WorkFolder,
    planned: Plan,
    listing: Listing,
    built: Sequence[BuiltShard],
    boxes: GatheredBoxes | None,
) -> Manifest:
    """Publish the tables, the provenance and, last, the manifest; then remove the work folder."""
    output = work_folder.output
    manifest = gather(work_folder, planned, listing, built, boxes)
    if manifest.archive and (archive := listing.reader.archive):
        link_archive(output / ARCHIVE_NAME, archive.path, work_folder.run)
    publish_bytes(output / PROVENANCE_NAME, canonical_json(_provenance(listing)), work_folder.run)
    publish_bytes(output / MANIFEST_NAME, manifest.to_bytes(), work_folder.run)
    work_folder.remove()
    return manifest


def gather(
    work_folder: WorkFolder,
    planned: Plan,
    listing: Listing,
    built: Sequence[BuiltShard],
    boxes: GatheredBoxes | None,
) -> Manifest:
    """Publish the tables of all shards; return the manifest, which is not published. Raises DataError."""
    output = work_folder.output
    if len(built) != len(planned.shards):
        raise OperationError(f"{len(built)} shards were built of {len(planned.shards)}", path=output)
    if not any(b.records for b in built):
        raise DataError("no image of the source is intact", path=output)
    tables = build_tables(work_folder, planned, built, boxes)
    manifest = _manifest(work_folder, planned, listing, built, tables)
    columns = manifest.columns.entries if manifest.columns else ()
    names = [table.name for table in (*tables, *(column.table for column in columns))]
    remove_stale(output, names)
    publish_tables(work_folder, names)
    return manifest


def verify_finished(output: Path, progress: Progress) -> None:
    """Verify a dataset that was found finished, and remove a work folder that is left of it.

    Raises DataError if it is damaged, OutputBusy, OSError.
    """
    progress.note(f"{output} is complete already; verifying it")
    report = verify(output, level="full", progress=progress)
    report.raise_for_findings()
    if (output / WORK_FOLDER_NAME).exists():
        with WorkFolder(output) as work_folder:
            if report.manifest:
                remove_unlisted_columns(output, {file.name for file in report.manifest.files})
            work_folder.remove()


def _manifest(
    work_folder: WorkFolder,
    planned: Plan,
    listing: Listing,
    built: Sequence[BuiltShard],
    tables: tuple[FileEntry, ...],
) -> Manifest:
    digests: Iterable[bytes] = (r["digest"].tobytes() for r in shard_rows(work_folder, built))
    records_root = content_root(digests)
    columns = build_columns(work_folder, planned, built, records_root)
    flags = [r["row"]["flags"] for r in shard_rows(work_folder, built)]
    return Manifest(
        split=planned.split,
        records=sum(b.records for b in built),
        image_bytes=sum(b.image_bytes for b in built),
        partial=listing.expected not in (None, len(planned.order)),
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


def _archive(planned: Plan, listing: Listing, built: Sequence[BuiltShard]) -> IndexedArchive | None:
    """Return the archive in which the images stay; None where the shards have them."""
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
