"""Repair: the damaged files, and only these, are rebuilt from the source to the same bytes."""

from __future__ import annotations

import os
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path

from shardprep.formats.conversion.plan import Plan, PlanOptions, plan, versions_for
from shardprep.formats.conversion.shard import BuiltShard, shard_jobs
from shardprep.formats.conversion.tables import (
    GatheredBoxes,
    build_column,
    build_tables,
    gathered_boxes,
    publish_tables,
)
from shardprep.formats.errors import OperationError, OutputBusy, PlanMismatch, SourceDamaged
from shardprep.formats.runtime.files import user_path
from shardprep.formats.runtime.jobs import JobRunner, ProgressCounters
from shardprep.formats.runtime.progress import Progress, shown
from shardprep.formats.runtime.work_folder import (
    PLAN_NAME,
    WORK_FOLDER_NAME,
    WorkFolder,
    finished_shards,
    noting_kept,
    refuse_cached,
    remove_leftover,
)
from shardprep.formats.shards.columns import ColumnEntry, remove_unlisted_columns
from shardprep.formats.shards.files import FileEntry
from shardprep.formats.shards.in_place import ARCHIVE_NAME
from shardprep.formats.shards.manifest import Manifest, read_manifest
from shardprep.formats.sources.recognise import LAYOUTS_OF_RECORDS, recognise
from shardprep.formats.sources.record_files import LABELS, usual
from shardprep.formats.sources.source import Listing, SourceOptions
from shardprep.formats.verification.levels import verify_folder
from shardprep.formats.verification.report import Report


def repair_from_source(
    dataset: str | os.PathLike[str],
    source: str | os.PathLike[str],
    *,
    root: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> Report:
    """Rebuild what ``verify(level="full")`` finds damaged or missing; return a new verification.

    All is as in :func:`~shardprep.formats.transfer.repair.repair` with a path.
    """
    path, progress = user_path(dataset), shown(progress)
    manifest, report = found_damaged(path, workers, executor, progress)
    joined = {
        file.name for name in manifest.joined if manifest.columns for file in manifest.columns[name].files
    }
    damaged = {finding.file for finding in report.findings} & {f.name for f in manifest.files} - joined
    if not damaged:
        return report
    recognised = recognise(
        user_path(source),
        split=manifest.split,
        options=_options_of(manifest, root),
        seed=manifest.plan["seed"],
    )
    listing = recognised.listing(manifest.split)
    planned = _planned_again(listing, manifest, path)
    boxes = gathered_boxes(recognised, manifest.split, listing)
    with WorkFolder(path) as work_folder:
        repair = _Repair(planned, manifest, work_folder, JobRunner(workers, executor, progress))
        repair.shards(damaged, listing)
        repair.tables(damaged, boxes)
        remove_unlisted_columns(path, {file.name for file in manifest.files})
        work_folder.remove()
    again = verify_folder(path, workers=workers, executor=executor, progress=progress)
    again.rebuilt = tuple(sorted(damaged))
    return again


def _options_of(manifest: Manifest, root: str | os.PathLike[str] | None) -> SourceOptions:
    """Return the options of a conversion; an earlier release took fewer names for images and labels."""
    options = replace(SourceOptions.of_manifest(manifest.source), root=root)
    if manifest.source["layout"] not in LAYOUTS_OF_RECORDS:
        return options
    if options.image_column is None and not manifest.has_images:
        options = replace(options, image_column="")
    names = [name.removesuffix(".txt") for name in manifest.schema.names]  # of a sample's part
    if options.label_column is None and not len(manifest.labels) and usual(names, LABELS):
        options = replace(options, label_column="")
    return options


def found_damaged(
    path: Path, workers: int | None, executor: Executor | None, progress: Progress
) -> tuple[Manifest, Report]:
    """Verify a dataset that is to be repaired. Raises what repairing raises."""
    refuse_cached(path)
    manifest = read_manifest(path)
    report = verify_folder(path, workers=workers, executor=executor, progress=progress)
    if report.unchecked:
        raise OperationError(f"could not check {report.unchecked[0]}", path=path)
    for finding in report.findings:
        if finding.file == ARCHIVE_NAME:
            raise SourceDamaged(
                f"{finding.problem}; prep repair rebuilds tables but no archive: copy or download it again",
                path=path,
            )
    if not report.findings and not (path / WORK_FOLDER_NAME / PLAN_NAME).exists():  # no join is unfinished
        with suppress(OutputBusy):
            remove_leftover(path)
    return manifest, report


def _planned_again(listing: Listing, manifest: Manifest, path: Path) -> Plan:
    names = {f.name for f in fields(PlanOptions)}
    options = PlanOptions(**{name: value for name, value in manifest.plan.items() if name in names})
    _check_transcoder(manifest, options, path)
    planned = plan(listing, options, version=manifest.version)
    if planned.digest != manifest.plan["sha256"]:
        raise PlanMismatch("was made from another source: keys, labels or sizes differ", path=path)
    return planned


def _check_transcoder(manifest: Manifest, options: PlanOptions, path: Path) -> None:
    """Raise OperationError if images were coded anew by another version than is here."""
    used = manifest.plan.get("transcoder")
    if options.transcodes and used != options.transcoder:
        raise OperationError(
            f"has images re-encoded by {used}, but {options.transcoder} is installed here; install that "
            "version to repair it",
            path=path,
        )


@dataclass
class _Repair:
    """The rebuilding in one work folder; a file that differs from the manifest's is not published."""

    planned: Plan
    manifest: Manifest
    work_folder: WorkFolder
    runner: JobRunner
    built: list[BuiltShard] = field(default_factory=list)

    def shards(self, damaged: set[str], listing: Listing) -> None:
        """Rebuild the damaged shards; if a table is damaged, also make the rows of all the others."""
        needed = self._needed(damaged)
        shards = [shard for shard in self.planned.shards if shard.number in needed]
        counters = ProgressCounters(self.work_folder.run, shards)
        expected = {file.name: file.sha256 for file in self.manifest.files}
        jobs = shard_jobs(
            self.planned,
            shards,
            listing.reader,
            self.work_folder,
            expected=expected,
            wanted=frozenset(damaged),
            home=versions_for(self.planned.options) if self.runner.executor else None,
        )
        records, size = sum(shard.records for shard in shards), sum(shard.size for shard in shards)
        with (
            noting_kept(partial(self._kept, {s.name for s in shards})),
            self.runner.progress.task("repair", records=records, size=size),
        ):
            self.built = self.runner.run(jobs, counters)

    def _needed(self, damaged: set[str]) -> set[int]:
        """Return the numbers of the shards whose records are read."""
        if damaged & {table.name for table in self.all_tables}:
            return {shard.number for shard in self.planned.shards}
        files = [self.manifest.shards, *(column.shards for column in self.columns)]
        return {number for shards in files for number, shard in enumerate(shards) if shard.name in damaged}

    @property
    def columns(self) -> tuple[ColumnEntry, ...]:
        return self.manifest.columns.entries if self.manifest.columns else ()

    @property
    def all_tables(self) -> tuple[FileEntry, ...]:
        """The dataset's tables, and those of its columns."""
        return (*self.manifest.tables, *(column.table for column in self.columns))

    def _kept(self, names: set[str]) -> str:
        """Return how many of these shards are rebuilt; empty if none is."""
        done = len(names & finished_shards(self.work_folder.output))
        return f"{done} of {len(names)} shards are rebuilt" if done else ""

    def tables(self, damaged: set[str], boxes: GatheredBoxes | None) -> None:
        """Rebuild the damaged tables; each must match the manifest before it is published."""
        made: list[FileEntry] = []
        if damaged & {table.name for table in self.manifest.tables}:
            made += build_tables(
                self.work_folder, self.planned, self.built, boxes, offsets=self.manifest.offsets
            )
        for column in self.columns:
            if column.table.name in damaged:
                name = column.field.name
                made.append(
                    build_column(
                        self.work_folder, self.planned, name, self.built, offsets=self.manifest.offsets
                    ).table
                )
        rebuilt = {table.name: table for table in made}
        wanted = [table for table in self.all_tables if table.name in damaged]
        for table in wanted:
            if rebuilt.get(table.name) != table:
                raise PlanMismatch(
                    "was made from another source: its bytes differ",
                    path=self.work_folder.output / table.name,
                )
        publish_tables(self.work_folder, [table.name for table in wanted])
