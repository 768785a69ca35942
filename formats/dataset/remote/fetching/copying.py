"""The copying of one or several datasets from one place, each file by a download of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardprep.formats.conversion.building.work_folder import WorkFolder, noting_kept
from shardprep.formats.conversion.preflight import check_room
from shardprep.formats.dataset.manifest import MANIFEST_NAME, WORK_FOLDER_NAME
from shardprep.formats.errors import UsageError
from shardprep.formats.processes.loop_thread import LoopThread
from shardprep.formats.progress import Progress
from shardprep.formats.system.storage.location import Location
from shardprep.formats.system.storage.remote_folder import RetryPolicy

from .download import Download
from .fetched_dataset import FetchedDataset
from .local_copy import LocalCopy
from .remote_dataset import RemoteDataset, find_datasets
from .transfer_run import TransferRun


def fetched_copies(
    place: Location,
    target: Path,
    shards: Sequence[int] | None,
    policy: RetryPolicy,
    *,
    at_once: int,
    progress: Progress,
) -> list[FetchedDataset]:
    """Copy what is at a place, as :func:`~.fetch.fetch` does."""
    with LoopThread(threads=at_once) as loop:
        copies = _copies(loop.run(find_datasets(place, policy)), target, shards, place)
        for copy in copies:
            copy.check()
        check_room({copy.output: needed for copy in copies if (needed := copy.bytes_to_write())})
        work = _Fetching(TransferRun(loop, at_once, progress), progress)
        return [work.fetched(copy) for copy in copies]


def _copies(
    found: dict[str, RemoteDataset], target: Path, shards: Sequence[int] | None, place: Location
) -> list[LocalCopy]:
    if "" not in found:
        _check_splits(found, target, shards, place)
    return [LocalCopy(dataset, target / split, shards) for split, dataset in found.items()]


def _check_splits(
    found: dict[str, RemoteDataset], target: Path, shards: Sequence[int] | None, place: Location
) -> None:
    if shards is not None:
        first = place.child(next(iter(found))).url
        raise UsageError(
            f"is a folder of splits ({', '.join(found)}): give one of them to choose shards, as {first}",
            path=place.url,
        )
    if any((target / name).exists() for name in (MANIFEST_NAME, WORK_FOLDER_NAME)):
        raise UsageError(
            f"holds one dataset, and {', '.join(found)} would lie in it; choose another folder", path=target
        )


@dataclass(frozen=True)
class _Fetching:
    """What is the same for all datasets."""

    transfers: TransferRun
    progress: Progress

    def fetched(self, copy: LocalCopy) -> FetchedDataset:
        with noting_kept(copy.kept), WorkFolder(copy.output) as work_folder:
            work_folder.claim(copy.guard, work="fetch")
            if kept := copy.kept():
                self.progress.note(f"{copy.output}: {kept} already; they are checked")
            downloads = copy.downloads()
            self.transfers.run("fetch", copy.manifest, downloads)
            complete = copy.finish(work_folder, downloads)
        names = {is_kept: _names(downloads, is_kept=is_kept) for is_kept in (True, False)}
        return FetchedDataset(copy.output, copy.url, copy.manifest, names[False], names[True], complete)


def _names(downloads: Sequence[Download], *, is_kept: bool) -> tuple[str, ...]:
    return tuple(each.entry.name for each in downloads if each.is_kept == is_kept)
