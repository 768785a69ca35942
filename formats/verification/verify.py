"""Verification of a dataset in a folder, or at a URL through a cache."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from shardprep.formats.errors import ShardprepError, UsageError
from shardprep.formats.runtime.files import user_path
from shardprep.formats.runtime.loop_thread import LoopThread, run_all
from shardprep.formats.runtime.progress import Progress
from shardprep.formats.shards.manifest import Manifest
from shardprep.formats.shards.read import FileEntry
from shardprep.formats.storage.cache import AT_ONCE, FileCache
from shardprep.formats.storage.open import cached_place
from shardprep.formats.storage.store import PATIENT, RemoteFolder
from shardprep.formats.storage.transfer import remote_dataset
from shardprep.formats.verification.checks import Report
from shardprep.formats.verification.levels import (
    LEVELS,
    MISSING,
    DatasetFiles,
    verify_files,
    verify_folder,
    wrong_size,
)


def verify(
    dataset: str | os.PathLike[str],
    *,
    level: str = "full",
    workers: int | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
    cache: str | os.PathLike[str] | None = None,
    cache_limit: int | str | None = None,
) -> Report:
    """Check a dataset and report every finding. Never changes the dataset, and does not crash on damage.

    Each level includes the one before:

    ``quick``: the manifest matches its ``root``; its files exist with their sizes, and there are no others.

    ``full``: every SHA-256 matches. The index, the table of boxes and the columns' tables fit the manifest:
    rows, shards, lengths (``image_bytes``), labels and the boxes' records. So the dataset can be opened.

    ``records``: every record matches its checksum and its row of the index; every column value matches its
    checksum, its record's key and its row of the table; and all match ``content_root``. Keys are unique. The
    plan's order, ``skipped`` and ``class_sorted`` are correct, and for the official classes ``partial``
    (otherwise it depends on the source). If images were skipped, the plan's order and ``class_sorted`` cannot
    be checked. Each shard is read in a separate process.

    ``decode``: every image decodes, and every column value decodes to the column's kind.

    No level compares with the source: only a pinned ``root`` protects ``source``, ``writer``, the classes'
    words and the boxes' coordinates. At a URL, extra files are not looked for.

    Args:
        dataset: Folder or URL of the dataset.
        level: "quick", "full", "records" or "decode".
        workers: Number of parallel reads; None is one per usable CPU, and 0 is one.
        executor: An executor of :mod:`concurrent.futures`, on one or many machines, that reads the shards of
            a folder instead, and is left open. At most ``workers`` jobs are submitted at a time; None or 0 is
            256. The report is the same as without it.
        progress: Receives the progress; None shows a bar in a notebook.
        cache: Folder that the files at a URL pass through; damaged copies in it are replaced. Files in it
            are read at the URL, too.
        cache_limit: Largest size of the cache, in bytes or as "200GiB"; it may be smaller than the dataset.
            None is the free space of the disk.

    Returns:
        All findings, the files that could not be checked, and notes.

    Raises:
        UnknownVersion: The format is newer than this release.
        UsageError: An argument is not valid.
        OSError: The manifest cannot be read.
        OperationError: The system allows no further process. With an ``executor`` also ExecutorFailed, and
            OtherMachine, which names a machine that sees another dataset or none.
    """
    if level not in LEVELS:
        raise UsageError(f"unknown level {level!r}; known are {', '.join(LEVELS)}")
    cached = cached_place(dataset, cache, cache_limit)
    if cached is None:
        return verify_folder(user_path(dataset), level, workers, executor, progress)
    place, folder, limit = cached
    if executor is not None:
        raise UsageError("is a URL, but an executor checks only folders; omit the executor", path=place.url)
    with FileCache(folder, limit, place) as files:
        return verify_files(CachedFiles(files), level, workers, None, progress)


class CachedFiles(DatasetFiles):
    """The files of a dataset at a URL, cached when they are read. Not picklable."""

    def __init__(self, cache: FileCache) -> None:
        super().__init__(cache.folder.datasets)
        self.url = cache.place.url
        self._cache = cache
        self._issues: dict[str, str | ShardprepError] = {}
        self._room_bytes = self._bytes_at_hand = 0
        self._let_go = threading.Condition()
        self._seen: set[str] = set()

    def manifest(self) -> Manifest:
        found = remote_dataset(self._cache.place)
        self._cache.folder.publish(found.manifest, found.data)
        self.folder = self._cache.folder.dataset(found.manifest.root)
        return found.manifest

    def look(self, entries: Sequence[FileEntry], level: str) -> None:
        if level != "quick":  # reading the files then shows more than their sizes
            self._cache.check_fits(entries)
            self._room_bytes = self._cache.room_bytes
            return
        remote = RemoteFolder(self._cache.place, PATIENT)

        async def ask(entry: FileEntry) -> None:
            try:
                found = await remote.about(entry.name)
                self._issues[entry.name] = wrong_size(entry, found.size) if found else MISSING
            except ShardprepError as error:
                self._issues[entry.name] = error

        with LoopThread(threads=1) as loop:
            loop.run(run_all([partial(ask, entry) for entry in entries], AT_ONCE))

    def issue(self, entry: FileEntry) -> str:
        issue = self._issues.get(entry.name, "")
        if isinstance(issue, ShardprepError):
            raise issue
        return issue

    @contextmanager
    def at_hand(self, entry: FileEntry) -> Iterator[Path]:
        """Yield the path of a cached file once there is room; one cached before is also read at the URL."""
        with self._let_go:
            self._let_go.wait_for(
                lambda: not self._bytes_at_hand or self._bytes_at_hand + entry.size <= self._room_bytes
            )
            self._bytes_at_hand += entry.size
        try:
            with self._cache.hold_intact(entry) as held:
                if not held.has_downloaded and entry.name not in self._seen:
                    self._cache.check_published(entry)
                self._seen.add(entry.name)
                yield self._cache.folder.path_of(entry)
        finally:
            with self._let_go:
                self._bytes_at_hand -= entry.size
                self._let_go.notify_all()

    def check_others(self, report: Report, manifest: Manifest) -> None:
        """Check nothing: a URL may hold other files."""

    def stop(self) -> None:
        self._cache.close()
