"""The files of a dataset at a URL, for its verification."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from shardprep.formats.containers.published_file import FileEntry
from shardprep.formats.dataset.manifest import Manifest
from shardprep.formats.dataset.verification.dataset_files import MISSING, DatasetFiles, wrong_size
from shardprep.formats.dataset.verification.report import Finding, Report
from shardprep.formats.dataset.verification.verify import verify_files
from shardprep.formats.errors import ShardprepError
from shardprep.formats.processes.loop_thread import LoopThread, run_all
from shardprep.formats.progress import Progress
from shardprep.formats.system.atomic_write import hash_file
from shardprep.formats.system.storage.location import Location
from shardprep.formats.system.storage.remote_folder import PATIENT, RemoteFolder, RetryPolicy

from .cached_dataset import remote_dataset
from .cached_download import AT_ONCE
from .dataset_folder import folder_of, publish_folder
from .eviction import hex_of
from .file_cache import FileCache


def verify_cached(
    place: Location,
    cache: str | os.PathLike[str],
    limit: int | None,
    level: str,
    *,
    workers: int | None = None,
    progress: Progress | None = None,
    policy: RetryPolicy = PATIENT,
) -> Report:
    """Check the dataset at a place through a cache, as :func:`~shardprep.formats.verify` does."""
    with FileCache(cache, limit, place, policy=policy) as files:
        return verify_files(CachedFiles(files, policy), level, workers, None, progress)


class CachedFiles(DatasetFiles):
    """The files of a dataset that come into a cache when they are read. Not picklable."""

    def __init__(self, cache: FileCache, policy: RetryPolicy) -> None:
        super().__init__(cache.folder.datasets)
        self.url = cache.place.url
        self._cache, self._policy = cache, policy
        self._looks: dict[str, _Look] = {}
        self._room_bytes = self._bytes_at_hand = 0
        self._let_go = threading.Condition()

    def manifest(self) -> Manifest:
        found = remote_dataset(self._cache.place, self._policy)
        publish_folder(self._cache.folder, found.manifest, found.data)
        self.folder = folder_of(self._cache.folder, found.manifest.root)
        return found.manifest

    def look(self, entries: Sequence[FileEntry], level: str) -> None:
        if level != "quick":  # then the files come, which shows more
            self._cache.check_fits(entries)
            self._room_bytes = self._cache.room_bytes
            return
        remote = RemoteFolder(self._cache.place, self._policy)
        self._looks = {entry.name: _Look(remote, entry) for entry in entries}
        with LoopThread(threads=1) as loop:
            loop.run(run_all([*self._looks.values()], AT_ONCE))

    def issue(self, entry: FileEntry) -> str:
        if (look := self._looks.get(entry.name)) is None:
            return ""
        if look.failure is not None:
            raise look.failure
        return look.issue

    @contextmanager
    def at_hand(self, entry: FileEntry) -> Iterator[Path]:
        path = self._cache.folder.path_of(hex_of(entry))
        with self._room_for(entry):
            with self._cache.hold([entry]) as held:
                is_right = held.came or hash_file(path) == entry.sha256
                if is_right:
                    yield path
            if not is_right:  # a disk did not keep it
                self._cache.discard(entry)
                with self._cache.hold([entry]):
                    yield path

    @contextmanager
    def _room_for(self, entry: FileEntry) -> Iterator[None]:
        """Wait for other threads of this process, however long they check what has the room."""
        with self._let_go:
            self._let_go.wait_for(
                lambda: not self._bytes_at_hand or self._bytes_at_hand + entry.size <= self._room_bytes
            )
            self._bytes_at_hand += entry.size
        try:
            yield
        finally:
            with self._let_go:
                self._bytes_at_hand -= entry.size
                self._let_go.notify_all()

    def others(self, manifest: Manifest) -> Iterator[tuple[Finding, bool]]:
        return iter(())


@dataclass
class _Look:
    """A look at the size of a remote file."""

    remote: RemoteFolder
    entry: FileEntry
    issue: str = ""
    failure: ShardprepError | None = field(default=None)

    async def run(self) -> None:
        """Ask what the store says of the file."""
        try:
            found = await self.remote.about(self.entry.name)
        except ShardprepError as error:
            self.failure = error
        else:
            self.issue = wrong_size(self.entry, found.size) if found else MISSING
