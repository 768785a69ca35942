"""Opening a dataset by path or URL."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, SupportsIndex, overload

from shardprep.formats.errors import UsageError
from shardprep.formats.runtime.progress import byte_count, checked_int
from shardprep.formats.shards.dataset import Dataset, TransformedDataset, splits_of
from shardprep.formats.storage.store import Location, path_or_place


@overload
def open_dataset(
    path: str | os.PathLike[str],
    *,
    transform: None = None,
    labels: str = "sorted_wnid0",
    cache: str | os.PathLike[str] | None = None,
    cache_limit: int | str | None = None,
    verify: bool = False,
) -> Dataset: ...
@overload
def open_dataset(
    path: str | os.PathLike[str],
    *,
    transform: Callable[..., Any],
    labels: str = "sorted_wnid0",
    cache: str | os.PathLike[str] | None = None,
    cache_limit: int | str | None = None,
    verify: bool = False,
) -> TransformedDataset: ...
def open_dataset(
    path: str | os.PathLike[str],
    *,
    transform: Callable[..., Any] | None = None,
    labels: str = "sorted_wnid0",
    cache: str | os.PathLike[str] | None = None,
    cache_limit: int | str | None = None,
    verify: bool = False,
) -> Dataset | TransformedDataset:
    """Open the dataset of one converted split, in a folder or at a URL.

    An index of more than 16 MiB that was verified before, and whose inode, size and times are unchanged, is
    not rehashed unless ``verify``; seals in the user's cache folder record this. Files from a URL are
    verified when they are downloaded: tables now, and kept while the dataset is open; shards when they are
    read. Close such a dataset at the end, or use it in ``with``.

    Args:
        path: Folder of the dataset, or its URL, as :func:`~shardprep.formats.fetch` takes it.
        transform: A Loader's transform, or a function of a record. Items are then (transform(record), label),
            in a :class:`TransformedDataset` for PyTorch's DataLoader.
        labels: Label space of the records: "sorted_wnid0" (0 to n - 1, by sorted class names),
            "ilsvrc2012_id" (the devkit's, 1 to n) or "sorted_wnid1_bg" (1 to n, 0 for background).
        cache: For a URL, a folder on a local disk, new or already a cache, which all processes of this
            machine share.
        cache_limit: Largest size of the cache, in bytes or as "200GiB"; None is the free space of the disk.
        verify: Whether to rehash a large index.

    Returns:
        The opened dataset.

    Raises:
        ManifestDamaged, UnknownVersion: The manifest cannot be read.
        UsageError: The labels are unknown; ``path`` is a folder of splits, which it names; a URL comes
            without a cache, or a folder with one.
        NothingThere, RemoteMissing, RemoteDamaged, RemoteFailed: The URL cannot be read.
        CacheBusy: Another process that shares the cache makes no progress.
        CacheTooSmall: The limit is less than the files that are read at once.
        OSError: A file cannot be read.
    """
    cached = cached_place(path, cache, cache_limit)
    if cached is None:
        dataset = Dataset(path, labels=labels, verify=verify)
    else:
        from shardprep.formats.storage.cache import CachedDataset  # start-up time: asyncio

        dataset = CachedDataset(*cached, labels=labels)
    return dataset if transform is None else TransformedDataset(dataset, transform)


def datasets_in(path: str | os.PathLike[str]) -> dict[str, Path | str]:
    """Return the splits in a folder or at a URL, by name; empty for a single dataset.

    Raises NothingThere, RemoteFailed, ManifestDamaged, OSError.
    """
    place = path_or_place(path)
    if isinstance(place, Path):
        return {**splits_of(place)}
    from shardprep.formats.storage.transfer import found_at  # start-up time: asyncio

    return {name: place.child(name).url for name in found_at(place) if name}


def cached_place(
    path: str | os.PathLike[str], cache: str | os.PathLike[str] | None, cache_limit: int | str | None
) -> tuple[Location, str | os.PathLike[str], int | None] | None:
    """Return the place of a URL, its cache and the limit in bytes; None for a path.

    Raises UsageError for a URL without a cache, or a path with one.
    """
    place = path_or_place(path)
    if isinstance(place, Location):
        if cache is None:
            raise UsageError(
                "is a URL: give a folder on a local disk to cache its files in, as cache= (--cache), or fetch "
                "the dataset",
                path=place.url,
            )
        if not isinstance(cache_limit, SupportsIndex | None):
            cache_limit = byte_count(cache_limit, of="cache_limit")
        return place, cache, None if cache_limit is None else checked_int(cache_limit, "cache_limit", least=1)
    if cache is not None or cache_limit is not None:
        raise UsageError(
            "is not a URL: a dataset on this machine is read in place, without a cache", path=path
        )
    return None
