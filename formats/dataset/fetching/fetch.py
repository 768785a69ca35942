"""The copy of a published dataset, or of a folder of splits, from object storage or a server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardprep.formats.conversion.building.work_folder import WorkFolder, noting_kept
from shardprep.formats.conversion.preflight import check_room
from shardprep.formats.dataset.manifest import MANIFEST_NAME, WORK_FOLDER_NAME, Manifest
from shardprep.formats.errors import UsageError
from shardprep.formats.processes.loop_thread import LoopThread
from shardprep.formats.progress import Progress, shown, tell_shards
from shardprep.formats.system.storage.location import Location
from shardprep.formats.system.storage.remote_folder import Patience
from shardprep.formats.system.user_path import user_path

from .download import Download
from .local_copy import LocalCopy
from .remote_dataset import RemoteDataset, find_datasets

AT_ONCE = 8
RETRIES = 10
TIMEOUT_S = 30.0


@dataclass(frozen=True)
class FetchedDataset:
    """One fetched dataset.

    ``path`` is its folder, ``url`` the place that it was fetched from, and ``manifest`` its manifest.
    ``fetched`` are the names of the files that were downloaded, and ``kept`` of those that were there and
    right. ``complete`` is whether all files of the dataset are there, and the manifest with them.
    """

    path: Path
    url: str
    manifest: Manifest
    fetched: tuple[str, ...]
    kept: tuple[str, ...]
    complete: bool


def fetch(
    url: str,
    folder: str | os.PathLike[str],
    *,
    shards: Sequence[int] | None = None,
    at_once: int = AT_ONCE,
    retries: int = RETRIES,
    timeout_s: float = TIMEOUT_S,
    progress: Progress | None = None,
) -> list[FetchedDataset]:
    """Copy a published dataset into a folder, each byte verified. After a kill, the same call goes on.

    A file has its name only when its size and SHA-256 are those in the manifest; the manifest comes last. A
    file that is there is kept if it is right, which its SHA-256 is computed for, and is fetched anew
    otherwise; so the same call also repairs a copy. What was downloaded of a file before a kill is kept, too.

    ``url`` is the place of a dataset, or of a folder of splits, of which each is fetched into
    ``folder/<split>``: ``s3://``, ``gs://``, ``az://``, ``https://``, ``http://`` or ``file://``. It has no
    user and no query; credentials are found in the environment. ``folder`` is new or empty, or one that the
    same call began or finished. ``shards`` are the numbers of the shards to fetch, None for all; the manifest
    is published once all are there. ``at_once`` is the number of files that are downloaded at the same time,
    ``retries`` how often a request that failed is sent again, and ``timeout_s`` after how many seconds
    without a byte it has failed. ``progress`` receives the progress, in bytes; None shows a bar in
    a notebook.

    Raises UsageError (PlanMismatch for a folder with anything else); ManifestDamaged and UnknownVersion for
    what is no dataset there; RemoteDamaged or RemoteMissing for a file that is not as the manifest lists it,
    after several downloads; OperationError (RemoteFailed, OutputBusy, NoSpace); OSError. Needs obstore.
    """
    if at_once < 1 or retries < 0 or not timeout_s > 0:
        raise UsageError("at_once must be at least 1, retries at least 0 and timeout_s more than 0")
    place, target, progress = Location.parse(url), user_path(folder), shown(progress)
    with LoopThread(threads=at_once) as loop:
        found = loop.run(find_datasets(place, Patience(retries, timeout_s)))
        copies = _copies(found, target, shards, place)
        for copy in copies:
            copy.check()
        check_room({copy.output: needed for copy in copies if (needed := copy.bytes_to_write())})
        work = _Fetching(loop, at_once, progress)
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

    loop: LoopThread
    at_once: int
    progress: Progress

    def fetched(self, copy: LocalCopy) -> FetchedDataset:
        with noting_kept(copy.kept), WorkFolder(copy.output) as work_folder:
            work_folder.claim(copy.guard, work="fetch")
            if kept := copy.kept():
                self.progress.note(f"{copy.output}: {kept} already; they are checked")
            downloads = copy.downloads()
            self._run(copy.manifest, downloads)
            complete = copy.finish(work_folder, downloads)
        names = {is_kept: _names(downloads, is_kept=is_kept) for is_kept in (True, False)}
        return FetchedDataset(copy.output, copy.url, copy.manifest, names[False], names[True], complete)

    def _run(self, manifest: Manifest, downloads: Sequence[Download]) -> None:
        names = {shard.name for shard in manifest.shards}
        shards, told = [each for each in downloads if each.entry.name in names], 0

        def tick() -> None:
            nonlocal told
            self.progress.at(0, sum(each.done for each in downloads))
            if (done := sum(each.is_done for each in shards)) > told:
                told = done
                tell_shards(self.progress, done, len(shards))

        size = sum(each.entry.size for each in downloads)
        with self.progress.task(f"fetch {manifest.split}", records=0, size=size):
            self.loop.run(_all(downloads, self.at_once), tick)


async def _all(downloads: Sequence[Download], at_once: int) -> None:
    """Run the downloads, some at once; the first failure cancels the others."""
    waiting = iter(downloads)
    failure: BaseException
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(at_once, len(downloads))):
                group.create_task(_each(waiting))
        return
    except BaseExceptionGroup as error:
        failure = error.exceptions[0]
    raise failure


async def _each(waiting: Iterator[Download]) -> None:
    for download in waiting:
        await download.run()


def _names(downloads: Sequence[Download], *, is_kept: bool) -> tuple[str, ...]:
    return tuple(each.entry.name for each in downloads if each.is_kept == is_kept)
