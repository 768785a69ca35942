"""The end of a conversion: tables, provenance and, last, the manifest."""

from __future__ import annotations

import socket
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from shardprep.formats.conversion.plan import Plan
from shardprep.formats.conversion.shard import BuiltShard, SkippedImage
from shardprep.formats.conversion.tables import (
    GatheredBoxes,
    build_columns,
    build_tables,
    publish_tables,
    remove_stale,
    shard_rows,
)
from shardprep.formats.errors import DataError, OperationError
from shardprep.formats.images.info import ImageFlag, cause_of
from shardprep.formats.records.labels import LabelSpace
from shardprep.formats.records.record import content_root
from shardprep.formats.runtime.files import publish_bytes
from shardprep.formats.runtime.json_record import canonical_json
from shardprep.formats.runtime.progress import Progress
from shardprep.formats.runtime.work_folder import WORK_FOLDER_NAME, WorkFolder
from shardprep.formats.shards.columns import remove_unlisted_columns
from shardprep.formats.shards.files import FileEntry
from shardprep.formats.shards.in_place import ARCHIVE_NAME, BLOCK_BYTES, IndexedArchive, link_archive
from shardprep.formats.shards.manifest import MANIFEST_NAME, PROVENANCE_NAME, Manifest
from shardprep.formats.shards.read import IN_PLACE, container
from shardprep.formats.shards.tables import kinds_in
from shardprep.formats.sources.source import Entries, Listing
from shardprep.formats.verification.levels import verify_folder


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
        raise DataError("the source has no intact image", path=output)
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
    report = verify_folder(output, level="full", progress=progress)
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
