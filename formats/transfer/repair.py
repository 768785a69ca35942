"""Repair of a dataset from its source, or from an intact copy in object storage."""

from __future__ import annotations

import os
from collections.abc import Collection
from concurrent.futures import Executor
from functools import partial
from pathlib import Path

from shardprep.formats.conversion.prepare import check_room
from shardprep.formats.conversion.repair import found_damaged, repair_from_source
from shardprep.formats.errors import PlanMismatch, UsageError
from shardprep.formats.runtime.files import user_path
from shardprep.formats.runtime.loop_thread import LoopThread
from shardprep.formats.runtime.progress import Progress, shown
from shardprep.formats.runtime.work_folder import WorkFolder, noting_kept
from shardprep.formats.shards.columns import remove_unlisted_columns
from shardprep.formats.shards.manifest import Manifest
from shardprep.formats.storage.store import PATIENT, Location
from shardprep.formats.storage.transfer import Download, RemoteDataset, TransferRun, find_datasets
from shardprep.formats.transfer.fetch import AT_ONCE, LocalCopy
from shardprep.formats.verification.levels import verify_folder
from shardprep.formats.verification.report import Report


def repair_from_url(
    path: Path, place: Location, *, workers: int | None, executor: Executor | None, progress: Progress
) -> Report:
    """Fetch the damaged files of the dataset in ``path``, as :func:`~.repair.repair` does."""
    manifest, report = found_damaged(path, workers, executor, progress)
    damaged = {finding.file for finding in report.findings} & {file.name for file in manifest.files}
    if not damaged:
        return report
    with LoopThread(threads=AT_ONCE) as loop:
        remote = _same_dataset(loop.run(find_datasets(place, PATIENT)), manifest, place)
        files = [file for file in manifest.files if file.name in damaged]
        check_room({path: sum(file.size for file in files)})
        with WorkFolder(path) as work_folder:
            copy = LocalCopy(remote, path, None)
            downloads = [
                Download(remote.folder, file, path / file.name, copy.part_of(file)) for file in files
            ]
            with noting_kept(partial(_kept, downloads)):
                TransferRun(loop, AT_ONCE, progress).run("repair", manifest, downloads)
            remove_unlisted_columns(path, {file.name for file in manifest.files})
            work_folder.remove()
    again = verify_folder(path, workers=workers, executor=executor, progress=progress)
    again.rebuilt = tuple(sorted(damaged))
    return again


def _same_dataset(found: dict[str, RemoteDataset], manifest: Manifest, place: Location) -> RemoteDataset:
    """Return the copy of the dataset among those at the URL. Raises PlanMismatch."""
    for remote in found.values():
        if remote.manifest.root == manifest.root:
            return remote
    raise PlanMismatch(f"has no copy of this dataset, whose root is {manifest.root}", path=place.url)


def _kept(downloads: Collection[Download]) -> str:
    """Return how many files are fetched; empty if none is."""
    done = sum(each.is_done for each in downloads)
    return f"{done} of {len(downloads)} damaged files are fetched" if done else ""


def repair(
    dataset: str | os.PathLike[str],
    source: str | os.PathLike[str],
    *,
    root: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> Report:
    """Restore what ``verify(level="full")`` finds damaged or missing, and verify again.

    A file is replaced only by one with the SHA-256 in the manifest, so the root stays the same; intact files
    are left alone. Files that do not belong to the dataset are reported and left alone.

    From a path, the damaged files are rebuilt. For a damaged table the whole source is read, because its rows
    come from all records. Files of columns that :func:`~shardprep.formats.conversion.join.join` added are
    reported and left alone: join them again to rebuild them. From a URL, the damaged files are fetched, those
    of joined columns, too; bytes that arrived before a kill are kept.

    Args:
        dataset: Folder of the dataset.
        source: Path that it was converted from, or URL of an intact copy, or of a folder of splits with one:
            ``s3://``, ``gs://``, ``az://``, ``https://``, ``http://`` or ``file://``.
        root: Folder that the paths of a list of images are relative to; None is the list's own.
        workers: As for :func:`~shardprep.formats.conversion.convert.convert`.
        executor: As for :func:`~shardprep.formats.conversion.convert.convert`.
        progress: Receives the progress; None shows a bar in a notebook.

    Returns:
        The new verification; its ``rebuilt`` are the files that were replaced.

    Raises:
        ManifestDamaged: The manifest is damaged.
        PlanMismatch: The source, or the copy, is a different one.
        ShardprepError: What :func:`~shardprep.formats.conversion.convert.convert` or
            :func:`~shardprep.formats.transfer.fetch.fetch` raises.
    """
    if not isinstance(source, Path) and "://" in (url := os.fspath(source)):
        if root is not None:
            raise UsageError("is the URL of a copy; --root is only for a list of images", path=url)

        return repair_from_url(
            user_path(dataset),
            Location.parse(url),
            workers=workers,
            executor=executor,
            progress=shown(progress),
        )
    return repair_from_source(
        dataset, source, root=root, workers=workers, executor=executor, progress=progress
    )
