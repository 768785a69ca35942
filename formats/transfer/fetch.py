"""Fetching verified copies of published datasets from object storage or a server."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from shardprep.formats.conversion.prepare import check_output, check_room
from shardprep.formats.errors import ManifestDamaged, PlanMismatch, UsageError
from shardprep.formats.runtime.files import publish_bytes, read_small_file
from shardprep.formats.runtime.loop_thread import LoopThread
from shardprep.formats.runtime.progress import Progress, check_int, progress_or_bar
from shardprep.formats.runtime.user_paths import user_path
from shardprep.formats.runtime.work_folder import WORK_FOLDER_NAME, WorkFolder, refuse_busy, refuse_other_plan
from shardprep.formats.shards.manifest import MAX_MANIFEST_BYTES, Manifest, tables_of
from shardprep.formats.shards.read import MANIFEST_NAME, FileEntry
from shardprep.formats.storage.cache_folder import hex_of
from shardprep.formats.storage.store import PATIENT, Location, RetryPolicy
from shardprep.formats.storage.transfer import (
    Download,
    RemoteDataset,
    TransferRun,
    find_datasets,
    several_splits_error,
    size_of,
)


@dataclass(frozen=True)
class FetchedDataset:
    """One fetched dataset.

    Attributes:
        path: Its folder.
        url: Where it was fetched from.
        manifest: Its manifest.
        fetched: Names of the downloaded files.
        kept: Names of the files that were there already, intact.
        complete: Whether all files of the dataset are there, including the manifest.
    """

    path: Path
    url: str
    manifest: Manifest
    fetched: tuple[str, ...]
    kept: tuple[str, ...]
    complete: bool


@dataclass(frozen=True)
class LocalCopy:
    """A remote dataset and its local folder; ``shards`` are the numbers to fetch, None for all."""

    remote: RemoteDataset
    output: Path
    shards: Sequence[int] | None

    def check(self) -> None:
        """Raise UsageError for unknown shards or an unsuitable output; OutputBusy; OSError."""
        self.remote.refuse_archive()
        count, url = len(self.remote.manifest.shards), self.remote.folder.place.url
        if wrong := [number for number in self.shards or () if number >= count]:
            raise UsageError(f"has the shards 0 to {count - 1}, not {wrong[0]}", path=url)
        if self.shards is not None and not self.shards:
            raise UsageError("no shard is requested", path=url)
        refuse_busy(self.output)
        if not self._is_published():
            check_output(self.output, work="a fetch")
            refuse_other_plan(self.output, {"dataset": self.remote.manifest.root}, work="fetch")

    def _is_published(self) -> bool:
        """Whether the manifest is there. Raises PlanMismatch for another one, OSError."""
        path = self.output / MANIFEST_NAME
        if not path.exists():
            return False
        if read_small_file(path, MAX_MANIFEST_BYTES, ManifestDamaged) != self.remote.manifest.to_bytes():
            raise PlanMismatch(
                "holds a different dataset from the one at the URL, or a damaged manifest.json; choose "
                "another folder, or remove this one",
                path=self.output,
            )
        return True

    @property
    def chosen_files(self) -> list[FileEntry]:
        """The files to fetch, tables first; all files if those not chosen exist, to complete the copy."""
        manifest = self.remote.manifest
        numbers = range(len(manifest.shards)) if self.shards is None else sorted(set(self.shards))
        sharded = [manifest.shards, *(column.shards for column in manifest.column_entries if column.shards)]
        chosen = tables_of(manifest) + [shards[number] for number in numbers for shards in sharded]
        names = {file.name for file in chosen}
        others = [file for file in manifest.files if file.name not in names]
        return chosen if any(map(self._is_missing, others)) else [*chosen, *others]

    def _is_missing(self, file: FileEntry) -> bool:
        return size_of(self.output / file.name) != file.size

    def bytes_to_write(self) -> int:
        """Return the approximate number of bytes still to be written."""
        missing = self.downloads(filter(self._is_missing, self.chosen_files))
        return sum(max(0, each.entry.size - max(0, size_of(each.part))) for each in missing)

    def downloads(self, files: Iterable[FileEntry]) -> list[Download]:
        """Return the downloads of these files; unfinished files are named by the expected digest."""
        folder, parts = self.remote.folder, self.output / WORK_FOLDER_NAME
        return [
            Download(folder, file, self.output / file.name, parts / f"{hex_of(file)}-{file.name}.part")
            for file in files
        ]

    def fetch(self, transfers: TransferRun) -> FetchedDataset:
        """Fetch the wanted files, and publish the manifest if all files are there and intact."""
        manifest = self.remote.manifest
        is_fixed = self._is_published() and not os.access(self.output, os.W_OK)  # its files are only compared
        with nullcontext() if is_fixed else WorkFolder(self.output) as work_folder:
            is_published = self._is_published()  # another process may have finished a dataset here since
            if work_folder:
                work_folder.claim({"dataset": manifest.root}, work="fetch")
            if count := sum(not self._is_missing(file) for file in manifest.files):
                done = f"{count} of {len(manifest.files)} files are fetched already"
                transfers.progress.note(f"{self.output}: {done}; checking them")
            downloads = self.downloads(self.chosen_files)
            fetched, kept = transfers.run("fetch", manifest, downloads, kept="files are fetched and intact")
            is_complete = len(downloads) == len(manifest.files)
            if is_complete and work_folder:
                if not is_published:
                    publish_bytes(self.output / MANIFEST_NAME, manifest.to_bytes(), work_folder.run)
                work_folder.remove()
        url = self.remote.folder.place.url
        return FetchedDataset(self.output, url, manifest, fetched, kept, is_complete)


AT_ONCE = 8


def fetch(
    url: str,
    folder: str | os.PathLike[str],
    *,
    shards: Iterable[int] | None = None,
    at_once: int = AT_ONCE,
    retries: int = PATIENT.retries,
    timeout_s: float = PATIENT.timeout_s,
    progress: Progress | None = None,
) -> list[FetchedDataset]:
    """Copy a published dataset into a folder, every byte verified. After a kill, the same call continues.

    A file gets its name only once its size and SHA-256 match the manifest; the manifest comes last. An
    existing file is kept if its SHA-256 is right, and otherwise fetched again, so the same call also repairs
    a copy. Partial downloads are continued.

    Args:
        url: URL of a dataset, or of a folder of splits, which are fetched into ``folder/<split>``:
            ``s3://``, ``gs://``, ``az://``, ``https://``, ``http://`` or ``file://``, without user and query.
            Credentials come from the environment.
        folder: A new or empty folder, or one that the same call began or finished.
        shards: Numbers of the shards to fetch; None is all. The manifest is published once all are there.
        at_once: Number of files to download at the same time.
        retries: Number of times to retry a failed request.
        timeout_s: Seconds without a byte after which a request fails.
        progress: Receives the progress, in bytes; None shows a bar in a notebook.

    Returns:
        The fetched and kept files of each dataset.

    Raises:
        UsageError: An argument is invalid; PlanMismatch for a folder with other content.
        NothingThere: There is no dataset at the URL.
        ManifestDamaged, UnknownVersion: The manifest cannot be read.
        RemoteDamaged, RemoteMissing: A file differs from the manifest after several downloads.
        OperationError: RemoteFailed, OutputBusy or NoSpace.
        OSError: A file cannot be written.
    """
    at_once = check_int(at_once, "at_once", least=1)
    place, policy = Location.parse(url), RetryPolicy(retries, timeout_s)
    target, progress = user_path(folder), progress_or_bar(progress)
    if shards is not None:
        shards = [check_int(number, "the number of a shard", least=0) for number in shards]
    with LoopThread(threads=at_once) as loop:
        datasets = loop.run(find_datasets(place, policy))
        if "" not in datasets:
            if shards is not None:
                raise several_splits_error(datasets, place)
            if any((target / name).exists() for name in (MANIFEST_NAME, WORK_FOLDER_NAME)):
                names = ", ".join(datasets)
                raise UsageError(
                    f"is itself a dataset, so {names} cannot go into it; choose another folder", path=target
                )
        copies = [LocalCopy(dataset, target / split, shards) for split, dataset in datasets.items()]
        for copy in copies:
            copy.check()
        check_room({copy.output: needed for copy in copies if (needed := copy.bytes_to_write())})
        transfers = TransferRun(loop, at_once, progress)
        return [copy.fetch(transfers) for copy in copies]
