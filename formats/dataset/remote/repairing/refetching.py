"""The repair of a dataset from an intact copy in object storage or on a server."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Executor
from functools import partial
from pathlib import Path

from shardprep.formats.columns.unlisted_columns import remove_unlisted_columns
from shardprep.formats.conversion.building.work_folder import WorkFolder, noting_kept
from shardprep.formats.conversion.preflight import check_room
from shardprep.formats.conversion.repair import found_damaged
from shardprep.formats.dataset.manifest import Manifest
from shardprep.formats.dataset.remote.fetching.download import Download
from shardprep.formats.dataset.remote.fetching.fetch import AT_ONCE
from shardprep.formats.dataset.remote.fetching.local_copy import LocalCopy
from shardprep.formats.dataset.remote.fetching.remote_dataset import RemoteDataset, find_datasets
from shardprep.formats.dataset.remote.fetching.transfer_run import TransferRun
from shardprep.formats.dataset.verification.report import Report
from shardprep.formats.dataset.verification.verify import verify
from shardprep.formats.errors import PlanMismatch
from shardprep.formats.processes.loop_thread import LoopThread
from shardprep.formats.progress import Progress
from shardprep.formats.system.storage.location import Location
from shardprep.formats.system.storage.remote_folder import PATIENT


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
    again = verify(path, workers=workers, executor=executor, progress=progress)
    again.rebuilt = tuple(sorted(damaged))
    return again


def _same_dataset(found: dict[str, RemoteDataset], manifest: Manifest, place: Location) -> RemoteDataset:
    """Return the copy of the dataset among those that are there. Raises PlanMismatch."""
    for remote in found.values():
        if remote.manifest.root == manifest.root:
            return remote
    raise PlanMismatch(f"has no copy of this dataset, of which the root is {manifest.root}", path=place.url)


def _kept(downloads: Collection[Download]) -> str:
    """Return how many files are fetched; empty if none is."""
    done = sum(each.is_done for each in downloads)
    return f"{done} of {len(downloads)} damaged files are fetched" if done else ""
