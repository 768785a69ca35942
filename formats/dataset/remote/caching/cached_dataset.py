"""A dataset at a URL, opened: its files come through a cache when they are read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from shardprep.formats.dataset.dataset import Dataset
from shardprep.formats.dataset.manifest import Manifest
from shardprep.formats.dataset.remote.fetching.remote_dataset import RemoteDataset, find_datasets
from shardprep.formats.errors import SourceDamaged, UsageError
from shardprep.formats.processes.loop_thread import LoopThread
from shardprep.formats.system.storage.location import Location
from shardprep.formats.system.storage.remote_folder import PATIENT, RetryPolicy
from shardprep.formats.system.user_path import user_path

from .cache_folder import CacheFolder
from .dataset_folder import folder_of, known_dataset, publish_folder
from .file_cache import FileCache
from .shard_pins import ShardPins


class CachedDataset(Dataset):
    """The dataset at ``place``, read through the cache in the folder ``cache``; see :func:`open_dataset`.

    ``path`` is its folder in the cache, in which shards come and go. With a ``root``, that dataset and no
    other is opened, and nothing is asked for over the network if it was opened with this cache before.
    Picklable (as its URL, cache, limit and root). :meth:`close` also ends the thread that downloads; the next
    read begins anew.
    """

    def __init__(
        self,
        place: Location,
        cache: str | os.PathLike[str],
        limit: int | None,
        *,
        labels: str = "sorted_wnid0",
        root: str | None = None,
        policy: RetryPolicy = PATIENT,
    ) -> None:
        self.url = place.url
        self._opening = place, user_path(cache).absolute(), limit, policy
        self._cache: FileCache | None = None
        self._root: str | None = None  # known when it is open
        self._pins = ShardPins(lambda: self.cache)
        self._bring = self._pins.bring
        try:
            folder = self.cache.folder
            manifest = self._manifest_in(folder, root)
            columns = manifest.columns.entries if manifest.columns else ()
            self.cache.keep([*manifest.tables, *(column.table for column in columns)])
            super().__init__(folder_of(folder, manifest.root), labels=labels)
            self._root = manifest.root
        except BaseException:
            self._end()
            raise

    @property
    def cache(self) -> FileCache:
        """The cache of this dataset's files, with the tables as long as the dataset is open."""
        if self._cache is None:
            place, folder, limit, policy = self._opening
            cache = FileCache(folder, limit, place, policy=policy)
            try:
                if self._root is not None:  # the folder may have been deleted since it was closed
                    self._manifest_in(cache.folder, self._root)
            except BaseException:
                cache.close()
                raise
            self._cache = cache
        return self._cache

    def _manifest_in(self, folder: CacheFolder, root: str | None) -> Manifest:
        """Return the manifest with that root which the cache knows, else the one at the place."""
        known = known_dataset(folder, root) if root else None
        return known or _asked(self._opening[0], folder, root, self._opening[3])

    @property
    def location(self) -> str:
        """The dataset's URL."""
        return self.url

    def _name_at(self, path: Path) -> str:
        return self._opening[0].name

    def close(self) -> None:
        """Close the shards, let their files go, and end the downloads. No other thread may be reading."""
        super().close()
        self._end()

    def _end(self) -> None:
        cache, self._cache = self._cache, None
        self._pins.release()
        if cache is not None:
            cache.close()

    def __reduce__(self) -> tuple[Any, ...]:
        place, folder, limit, policy = self._opening
        return _reopened, (place, folder, limit, self.label_space, self.manifest.root, policy)


def _reopened(
    place: Location, cache: Path, limit: int | None, labels: str, root: str, policy: RetryPolicy
) -> CachedDataset:
    return CachedDataset(place, cache, limit, labels=labels, root=root, policy=policy)


def _asked(place: Location, folder: CacheFolder, root: str | None, policy: RetryPolicy) -> Manifest:
    """Read the manifest at the place, and make the dataset's folder in the cache."""
    found = remote_dataset(place, policy)
    if root not in (None, found.manifest.root):
        raise SourceDamaged("was replaced by another dataset; open it again", path=place.url)
    publish_folder(folder, found.manifest, found.data)
    return found.manifest


def found_at(place: Location, policy: RetryPolicy = PATIENT) -> dict[str, RemoteDataset]:
    """Return the dataset at a place by the name "", or the splits there; as :func:`find_datasets` does."""
    with LoopThread(threads=1) as loop:
        return loop.run(find_datasets(place, policy))


def remote_dataset(place: Location, policy: RetryPolicy) -> RemoteDataset:
    """Return the dataset at a place. Raises UsageError for a folder of splits, and what fetching does."""
    found = found_at(place, policy)
    if "" not in found:
        first = place.child(next(iter(found))).url
        raise UsageError(
            f"is a folder of splits ({', '.join(found)}): give one of them, as {first}", path=place.url
        )
    found[""].refuse_archive()
    return found[""]
