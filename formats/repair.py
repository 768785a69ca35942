"""Repair: exactly the damaged shards are built again from the source, to the same bytes."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path

from .board import BOARD_NAME, Board
from .build import shard_jobs
from .errors import OperationError, PlanMismatch
from .finish import publish_tables
from .manifest import Manifest, read_manifest
from .plan import Plan, PlannedShard, PlanOptions, plan
from .progress import Progress, Silent
from .recognise import recognise
from .run_jobs import run_jobs
from .source import Listing, Source
from .verify import Report, verify
from .workplace import Workplace


def repair(
    dataset: str | os.PathLike[str],
    source: str | os.PathLike[str],
    *,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Rebuild what ``verify(level="full")`` finds damaged or missing; returns a new verification.

    A shard is replaced only by one of the SHA-256 that the manifest names, so the root stays. A
    damaged table takes rebuilding all shards, since its rows come from them. Foreign files are
    reported, and left alone. Raises ManifestDamaged where the manifest itself is: convert again
    then; PlanMismatch where the source is another; else as :func:`~.convert.convert`.
    """
    path, progress = Path(dataset), progress or Silent()
    manifest = read_manifest(path)
    report = verify(path, workers=workers, progress=progress)
    if report.unchecked:
        raise OperationError(f"could not check {report.unchecked[0]}", path=path)
    damaged = {finding.file for finding in report.findings} & {f.name for f in manifest.files}
    if not damaged:
        return report
    recognised = recognise(Path(source), split=manifest.split)
    listing = recognised.listing(manifest.split)
    planned = _planned_again(listing, manifest, path)
    with Workplace(path) as workplace:
        _rebuild(planned, manifest, damaged, recognised, listing, workplace, workers, progress)
        workplace.remove()
    return verify(path, workers=workers, progress=progress)


def _planned_again(listing: Listing, manifest: Manifest, path: Path) -> Plan:
    names = {f.name for f in fields(PlanOptions)}
    options = PlanOptions(**{name: value for name, value in manifest.plan.items() if name in names})
    planned = plan(listing, options)
    if planned.digest != manifest.plan["sha256"]:
        raise PlanMismatch(
            "was made from another source than this one: keys, labels or sizes differ", path=path
        )
    return planned


def _rebuild(
    planned: Plan,
    manifest: Manifest,
    damaged: set[str],
    source: Source,
    listing: Listing,
    workplace: Workplace,
    workers: int | None,
    progress: Progress,
) -> None:
    tables = {t.name for t in manifest.tables}
    shards = planned.shards if damaged & tables else [s for s in planned.shards if s.name in damaged]
    board = Board(workplace.folder / BOARD_NAME, shards)
    expected = {s.name: s.sha256 for s in manifest.shards}
    jobs = shard_jobs(planned, shards, listing.reader, workplace.output, expected=expected)
    with progress.task("repair", records=_records(shards), size=sum(s.extent.payload_bytes for s in shards)):
        built = run_jobs(jobs, board, workers=workers, progress=progress)
    if damaged & tables:
        published = publish_tables(workplace, planned, listing.labels, built, source.boxes(manifest.split))
        if published != manifest.tables:
            raise PlanMismatch("was made with other boxes than this source has", path=workplace.output)


def _records(shards: tuple[PlannedShard, ...] | list[PlannedShard]) -> int:
    return sum(s.extent.records for s in shards)
