"""Repairing a dataset from its source, or from an intact copy in object storage.

Only the damaged files are rebuilt, with the same bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

from shardprep.formats.conversion.convert import lock_finished
from shardprep.formats.conversion.join import is_being_joined
from shardprep.formats.conversion.plan import Plan, PlanOptions, make_plan, writer_versions
from shardprep.formats.conversion.prepare import check_room
from shardprep.formats.conversion.shard import build_index, build_tables, shard_jobs, write_column_tables
from shardprep.formats.errors import OperationError, OutputBusy, PlanMismatch, SourceDamaged, UsageError
from shardprep.formats.runtime.files import publish
from shardprep.formats.runtime.jobs import JobRunner
from shardprep.formats.runtime.loop_thread import LoopThread
from shardprep.formats.runtime.progress import Progress, progress_or_bar
from shardprep.formats.runtime.user_paths import user_path
from shardprep.formats.runtime.work_folder import (
    PLAN_NAME,
    WORK_FOLDER_NAME,
    WorkFolder,
    add_resume_note,
    describe_finished,
    refuse_cached,
    remove_leftover,
)
from shardprep.formats.shards.dataset import refuse_folder_of_splits
from shardprep.formats.shards.manifest import Manifest, read_manifest, tables_of
from shardprep.formats.shards.read import ARCHIVE_NAME, FileEntry
from shardprep.formats.sources.recognise import recognise
from shardprep.formats.sources.record_files import LABEL_NAMES, find_known_names
from shardprep.formats.sources.source import Listing, SourceOptions
from shardprep.formats.storage.store import PATIENT, Location, path_or_place
from shardprep.formats.storage.transfer import TransferRun, find_datasets
from shardprep.formats.transfer.fetch import AT_ONCE, LocalCopy
from shardprep.formats.verification.checks import Report
from shardprep.formats.verification.verify import verify


def repair(
    dataset: str | os.PathLike[str],
    source: str | os.PathLike[str],
    *,
    root: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> Report:
    """Restore the files that ``verify(level="full")`` finds damaged or missing, and verify again.

    A file is replaced only by one with the SHA-256 in the manifest, so the root stays the same. Intact files
    are left alone, as are files that do not belong to the dataset, which are reported.

    From a path, the damaged files are rebuilt; a damaged table takes the whole source, because its rows come
    from all records. Columns that :func:`~shardprep.formats.conversion.join.join` added are only reported:
    join them again to rebuild them. From a URL, the damaged files are fetched, including joined columns;
    partial downloads are continued after a kill.

    Args:
        dataset: Folder of the dataset.
        source: Path that it was converted from, or URL of an intact copy, or of a folder of splits with one:
            ``s3://``, ``gs://``, ``az://``, ``https://``, ``http://`` or ``file://``.
        root: Folder that the paths in a list of images are relative to; None is the list's own.
        workers, executor: As for :func:`~shardprep.formats.conversion.convert.convert`.
        progress: Receives the progress; None shows a bar in a notebook.

    Returns:
        The new report; its ``rebuilt`` are the replaced files.

    Raises:
        ManifestDamaged: The manifest is damaged.
        PlanMismatch: The source or copy is a different one, or a join of columns is not finished.
        ShardprepError: The errors of :func:`~shardprep.formats.conversion.convert.convert` or
            :func:`~shardprep.formats.transfer.fetch.fetch`.
    """
    origin = path_or_place(source)
    if isinstance(origin, Location) and root is not None:
        raise UsageError("is the URL of a copy; --root is only for a list of images", path=origin.url)
    for given_path in (origin, None if root is None else user_path(root)):
        if isinstance(given_path, Path) and not given_path.exists():  # also if there is nothing to repair
            raise UsageError("does not exist; correct the path", path=given_path)
    path, runner = user_path(dataset), JobRunner(workers, executor, progress_or_bar(progress))
    verified = partial(verify, path, workers=workers, executor=executor, progress=runner.progress)
    refuse_cached(path)
    refuse_folder_of_splits(path)
    manifest, report = read_manifest(path), verified()
    _refuse_irreparable(report, path)
    damaged = {finding.file for finding in report.findings} & {file.name for file in manifest.files}
    if isinstance(origin, Path):
        joined = [column for column in manifest.column_entries if column.field.name in manifest.joined]
        damaged -= {file.name for column in joined for file in column.files}
    if not damaged:
        return report
    if isinstance(origin, Path):
        _rebuild(path, manifest, damaged, origin, root, runner)
    else:
        _fetch(path, manifest, damaged, origin, runner.progress)
    again = verified()
    again.rebuilt = tuple(sorted(damaged))
    return again


def _refuse_irreparable(report: Report, path: Path) -> None:
    """Refuse unreadable files and a damaged archive; remove leftovers of work from an intact dataset."""
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


@contextmanager
def _open_work_folder(path: Path, manifest: Manifest) -> Iterator[WorkFolder]:
    """Open the work folder, and clean up at the end. Raises PlanMismatch if a join is not finished."""
    with lock_finished(path, manifest) as work_folder:
        if is_being_joined(work_folder, manifest):
            raise PlanMismatch(
                "has an unfinished join, which a repair would discard; run the same prep join again first, or "
                f"remove {work_folder.folder} to give it up",
                path=path,
            )
        yield work_folder


def _fetch(path: Path, manifest: Manifest, damaged: set[str], place: Location, progress: Progress) -> None:
    """Fetch the damaged files from a copy at a place. Raises PlanMismatch if there is none."""
    with LoopThread(threads=AT_ONCE) as loop:
        datasets = loop.run(find_datasets(place, PATIENT)).values()
        files = [file for file in manifest.files if file.name in damaged]
        remote = next((remote for remote in datasets if {*files} <= {*remote.manifest.files}), None)
        if remote is None:
            lacking = "has no copy of this dataset's damaged files, such as"
            raise PlanMismatch(f"{lacking} {files[0].name} with {files[0].sha256}", path=place.url)
        downloads = LocalCopy(remote, path, None).downloads(files)
        check_room({path: sum(file.size for file in files)})
        with _open_work_folder(path, manifest):
            run = TransferRun(loop, AT_ONCE, progress).run
            run("repair", manifest, downloads, kept="damaged files are fetched")


def _rebuild(
    path: Path,
    manifest: Manifest,
    damaged: set[str],
    source: Path,
    root: str | os.PathLike[str] | None,
    runner: JobRunner,
) -> None:
    """Rebuild the damaged files from the source. Raises PlanMismatch before publishing a different table."""
    split, offsets = manifest.split, manifest.offsets
    options, seed = _options_of(manifest, root), manifest.plan["seed"]
    recognised = recognise(source, split=split, options=options, seed=seed, progress=runner.progress)
    listing = recognised.listing(split)
    plan = _repeat_plan(listing, manifest, path)
    boxes = recognised.boxes(listing.split, listing.labels)
    wanted = [table for table in tables_of(manifest) if table.name in damaged]
    files = [manifest.shards, *(column.shards for column in manifest.column_entries)]
    needed = {number for shards in files for number, shard in enumerate(shards) if shard.name in damaged}
    if wanted:  # their rows come from all shards
        needed = {shard.number for shard in plan.shards}
    shards = tuple(shard for shard in plan.shards if shard.number in needed)
    kept = partial(describe_finished, path, [shard.name for shard in shards], "rebuilt")
    with _open_work_folder(path, manifest) as work_folder, add_resume_note(kept):
        expected = {file.name: file.sha256 for file in manifest.files}
        home = writer_versions(plan.options) if runner.executor else None
        given = {"expected_sha256": expected, "files_to_write": frozenset(damaged), "home_versions": home}
        jobs = shard_jobs(plan, shards, work_folder, **given)
        built = runner.run("repair", jobs, work_folder.run, shards)
        made: list[FileEntry] = []
        if wanted:
            index = build_index(work_folder, plan, built, offsets=offsets)
            columns = write_column_tables(work_folder, listing.schema, built, offsets=offsets)
            made = [*build_tables(work_folder, index, built, boxes), *(column.table for column in columns)]
        for table in wanted:
            if table not in made:
                raise PlanMismatch("was made from another source: its bytes differ", path=path / table.name)
        for table in wanted:
            publish(work_folder.run / table.name, path / table.name)


def _options_of(manifest: Manifest, root: str | os.PathLike[str] | None) -> SourceOptions:
    """Return the conversion's source options; an earlier release knew fewer names for images and labels."""
    options = replace(SourceOptions.of_manifest(manifest.source), root=root)
    if manifest.source["layout"] not in ("webdataset", "tfrecord", "parquet", "tensorpack-lmdb"):
        return options
    if options.image_column is None and not manifest.has_images:
        options = replace(options, image_column="")
    names = [name.removesuffix(".txt") for name in manifest.schema.names]
    if options.label_column is None and not len(manifest.labels) and find_known_names(names, LABEL_NAMES):
        options = replace(options, label_column="")
    return options


def _repeat_plan(listing: Listing, manifest: Manifest, path: Path) -> Plan:
    names = {f.name for f in fields(PlanOptions)}
    options = PlanOptions(**{name: value for name, value in manifest.plan.items() if name in names})
    used = manifest.plan.get("transcoder")
    if options.transcodes and used != options.transcoder:
        raise OperationError(
            f"has images re-encoded by {used}, but {options.transcoder} is installed here; install that "
            "version to repair it",
            path=path,
        )
    plan = make_plan(listing, options, version=manifest.version)
    if plan.digest != manifest.plan["sha256"]:
        raise PlanMismatch(
            "was made from another source, or read by another release: keys, labels, sizes or columns differ; repair "
            "it with that release, or from an intact copy, given as a URL, such as file:///folder/copy",
            path=path,
        )
    return plan
