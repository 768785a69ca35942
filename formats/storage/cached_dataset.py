"""Opened datasets at a URL, whose files are cached when they are read."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from shardprep.formats.errors import ManifestDamaged, SourceDamaged
from shardprep.formats.runtime.files import publish_bytes, unfinished, user_path
from shardprep.formats.runtime.loop_thread import LoopThread
from shardprep.formats.shards.dataset import Dataset
from shardprep.formats.shards.manifest import MANIFEST_NAME, Manifest, read_manifest
from shardprep.formats.shards.read import FileEntry
from shardprep.formats.shards.tables import INDEX_NAME
from shardprep.formats.storage.cache import FileCache, FileSource, HeldFiles, saying_published
from shardprep.formats.storage.cache_folder import CacheFolder
from shardprep.formats.storage.store import PATIENT, Location
from shardprep.formats.storage.transfer import RemoteDataset, find_datasets, several


def folder_of(cache: CacheFolder, root: str) -> Path:
    return cache.datasets / root.removeprefix("sha256:")


def known_dataset(cache: CacheFolder, root: str) -> Manifest | None:
    """Return the manifest of a dataset that was opened before, or None. Raises OSError."""
    try:
        manifest = read_manifest(folder_of(cache, root))
    except (FileNotFoundError, ManifestDamaged):
        return None
    return manifest if manifest.root == root else None


def publish_folder(cache: CacheFolder, manifest: Manifest, data: bytes) -> None:
    """Make a dataset's folder unless it exists; the manifest comes last. Raises OSError."""
    folder = folder_of(cache, manifest.root)
    with cache.turn():
        if known_dataset(cache, manifest.root) is not None:
            return
        folder.mkdir(exist_ok=True)
        for entry in manifest.files:
            target = os.path.relpath(cache.path_of(entry), folder)  # relative: a cache can be moved
            _link(folder / entry.name, target)
        publish_bytes(folder / MANIFEST_NAME, data, folder)


def _link(path: Path, target: str) -> None:
    with suppress(OSError):
        if str(path.readlink()) == target:
            return
    new = unfinished(path.parent, path.name)
    new.symlink_to(target)
    new.replace(path)


def tables_of(manifest: Manifest) -> list[FileEntry]:
    """Return the tables of a dataset and its columns, which stay in the cache while it is open."""
    return [*manifest.tables, *(column.table for column in manifest.column_entries)]


class CachedDataset(Dataset):
    """The dataset at ``place``, read through the cache in the folder ``cache``; see :func:`open_dataset`.

    ``path`` is its folder in the cache, where shards come and go. With a ``root``, only that dataset is
    opened, and without network access if this cache knows it. Picklable (as its URL, cache, limit and root).
    :meth:`close` also stops the download thread; the next read restarts it.
    """

    def __init__(
        self,
        place: Location,
        cache: str | os.PathLike[str],
        limit: int | None,
        *,
        labels: str = "sorted_wnid0",
        root: str | None = None,
    ) -> None:
        self._place = place
        self.source = FileSource(place.url, user_path(cache).absolute(), limit)
        self._cache: FileCache | None = None
        self._lock = threading.Lock()  # for opening the cache
        self._root: str | None = None  # set once it is open
        self._files = self._held = HeldFiles(lambda: self.cache)
        try:
            folder = self.cache.folder
            manifest = self._manifest_in(folder, root)
            self.cache.keep(self.cache.hold(tables_of(manifest)))
            for table in manifest.tables:
                if table.name != INDEX_NAME:  # checked when it is read on opening
                    self.cache.keep(self.cache.hold_intact(table))
            self._open(folder_of(folder, manifest.root), labels, manifest)
            self._root = manifest.root
        except BaseException:
            self._end()
            raise

    def _open(self, folder: Path, labels: str, manifest: Manifest) -> None:
        try:
            super().__init__(folder, labels=labels)
        except (ManifestDamaged, OSError):
            if (index := manifest.table(INDEX_NAME)) is None:
                raise
            self.cache.keep(self.cache.hold_intact(index))
            with saying_published(self._place, self.cache.folder.path, index):
                super().__init__(folder, labels=labels)

    @property
    def cache(self) -> FileCache:
        """The cache of this dataset's files, which keeps the tables while the dataset is open."""
        if (found := self._cache) is not None:  # without the lock, which a forked copy might never get
            return found
        with self._lock:
            if self._cache is None:
                with ExitStack() as failed:
                    cache = failed.enter_context(self.source.opened())
                    if self._root is not None:  # the folder may have been deleted since it was closed
                        self._manifest_in(cache.folder, self._root)
                    failed.pop_all()
                self._cache = cache
            return self._cache

    def _manifest_in(self, folder: CacheFolder, root: str | None) -> Manifest:
        """Return the manifest with that root if the cache knows it, else the one at the place."""
        if root and (known := known_dataset(folder, root)) is not None:
            return known
        found = remote_dataset(self._place)
        if root not in (None, found.manifest.root):
            raise SourceDamaged("was replaced by another dataset; open it again", path=self._place.url)
        publish_folder(folder, found.manifest, found.data)
        return found.manifest

    @property
    def location(self) -> str:
        return self._place.url

    def _name_at(self, path: Path) -> str:
        return self._place.name

    def close(self) -> None:
        """Close the shards, release their files, and stop downloads. No other thread may be reading."""
        super().close()
        self._end()

    def _end(self) -> None:
        cache, self._cache = self._cache, None
        self._held.release()
        if cache is not None:
            cache.close()

    def __reduce__(self) -> tuple[Any, ...]:
        again = partial(CachedDataset, labels=self.label_space, root=self.manifest.root)
        return again, (self._place, self.source.cache, self.source.limit)


def found_at(place: Location) -> dict[str, RemoteDataset]:
    """Return the dataset at a place under the name "", or its splits, as :func:`find_datasets` does."""
    with LoopThread(threads=1) as loop:
        return loop.run(find_datasets(place, PATIENT))


def remote_dataset(place: Location) -> RemoteDataset:
    """Return the dataset at a place. Raises UsageError for a folder of splits, and the errors of fetching."""
    found = found_at(place)
    if "" not in found:
        raise several(found, place)
    found[""].refuse_archive()
    return found[""]
