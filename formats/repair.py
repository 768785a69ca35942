"""Repair: exactly the damaged shards are built again from the source, to the same bytes."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from pathlib import Path

from .board import BOARD_NAME, Board
from .box_table import GatheredBoxes
from .build import BuiltShard, shard_jobs
from .convert import gathered_boxes
from .errors import OperationError, PlanMismatch
from .manifest import Manifest, read_manifest
from .plan import Plan, PlanOptions, plan
from .progress import Progress, Silent
from .recognise import recognise
from .run_jobs import run_jobs
from .source import Listing
from .tables import build_tables, publish_tables
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
    boxes = gathered_boxes(recognised, manifest.split, listing)
    with Workplace(path) as workplace:
        repair = _Repair(planned, manifest, workplace, workers, progress)
        repair.shards(damaged, listing)
        repair.tables(damaged, boxes)
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


@dataclass
class _Repair:
    """Rebuilds in one workplace; what comes out otherwise than the manifest says is not published."""

    planned: Plan
    manifest: Manifest
    workplace: Workplace
    workers: int | None
    progress: Progress
    built: list[BuiltShard] = field(default_factory=list)

    def shards(self, damaged: set[str], listing: Listing) -> None:
        """The damaged shards; all of them where a table is damaged, since its rows come from them."""
        everything = bool(damaged & {t.name for t in self.manifest.tables})
        shards = [s for s in self.planned.shards if everything or s.name in damaged]
        board = Board(self.workplace.folder / BOARD_NAME, shards)
        expected = {s.name: s.sha256 for s in self.manifest.shards}
        jobs = shard_jobs(self.planned, shards, listing.reader, self.workplace.output, expected=expected)
        records, size = (sum(getattr(s.extent, n) for s in shards) for n in ("records", "payload_bytes"))
        with self.progress.task("repair", records=records, size=size):
            self.built = run_jobs(jobs, board, workers=self.workers, progress=self.progress)

    def tables(self, damaged: set[str], boxes: GatheredBoxes | None) -> None:
        """The damaged tables; each must be the manifest's before it is published."""
        wanted = [t for t in self.manifest.tables if t.name in damaged]
        if not wanted:
            return
        made = build_tables(self.workplace, self.planned, self.built, boxes)
        for table in wanted:
            if table not in made:
                raise PlanMismatch(
                    "was made from another source than this one: it comes out otherwise",
                    path=self.workplace.output / table.name,
                )
        publish_tables(self.workplace, [t.name for t in wanted])
