"""An opened collection: the records of several datasets by number, as if they were one."""

from __future__ import annotations

import os
from itertools import accumulate
from pathlib import Path
from typing import Any

from shardprep.formats.dataset.dataset import Dataset
from shardprep.formats.dataset.index import INDEX_NAME
from shardprep.formats.dataset.manifest import COLLECTION_NAME, Manifest
from shardprep.formats.dataset.record_set import DatasetPart, IndexRows, RecordSet
from shardprep.formats.dataset.remote.open_dataset import open_dataset, refuse_cache, url_of
from shardprep.formats.dataset.splits import is_collection
from shardprep.formats.dataset.table_checks import checked_index
from shardprep.formats.errors import ManifestDamaged
from shardprep.formats.system.user_path import user_path

from .agreement import differences
from .chained_index import ChainedIndex
from .collection_file import read_collection
from .stored_index import StoredIndex

MOST_INDEX_BYTES = 1 << 30  # of all parts that are held in memory, 18 million records; more stay in files


class Collection(RecordSet):
    """An opened collection, in the folder ``path``: records are numbered over all ``parts``, in order.

    Each part is a finished dataset: ``part.name``, ``part.folder``, ``part.manifest``, and the numbers of its
    first record and shard. ``len``, ``[i]``, iteration, ``index``, ``classes``, ``schema`` and ``labels`` are
    as for a :class:`.Dataset`; ``index`` is read by a number, a slice, an array of numbers or a column's
    name, and its column ``shard`` counts the shards of all parts. Indexes of more than 1 GiB together stay in
    their files, and are read by position: a whole column then takes its memory. ``verify`` is as for
    :func:`open_dataset`.

    Raises DataError for a part that is not the one that was collected, which it names; what a Dataset raises;
    and UsageError for unknown labels.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, labels: str = "sorted_wnid0", verify: bool = False
    ) -> None:
        path = user_path(path)
        self._file = read_collection(path)
        manifests = [entry.manifest(path) for entry in self._file.parts]
        names = [entry.name for entry in self._file.parts]
        if found := differences(names, manifests):
            raise ManifestDamaged(found, path=path / COLLECTION_NAME)
        folders = [path / entry.path for entry in self._file.parts]
        first_records = accumulate((each.records for each in manifests), initial=0)
        first_shards = accumulate((len(each.shards) for each in manifests), initial=0)
        parts = tuple(map(DatasetPart, names, folders, manifests, first_records, first_shards))
        super().__init__(path, parts, _index_of(parts, verify=verify), labels=labels)

    @property
    def root(self) -> str:
        """The root of the collection: a hash over the roots of all parts, in order."""
        return self._file.root

    def __reduce__(self) -> tuple[Any, ...]:
        return _collection_at, (self.path, self.label_space)

    def __repr__(self) -> str:
        return f"<Collection {os.fspath(self.path)!r}: {len(self):,} records in {len(self.parts):,} parts>"


def _index_of(parts: tuple[DatasetPart, ...], *, verify: bool) -> ChainedIndex:
    """Open the indexes of all parts. Raises ManifestDamaged, OSError."""
    entries = [part.manifest.table(INDEX_NAME) for part in parts]
    in_memory = sum(entry.size for entry in entries if entry) <= MOST_INDEX_BYTES
    rows: list[IndexRows] = []
    for part in parts:
        if part.manifest.archive:
            part.manifest.archive.check(part.folder)
        rows.append(_rows_of(part.folder, part.manifest, in_memory=in_memory, verify=verify))
    return ChainedIndex(rows, [len(part.manifest.shards) for part in parts])


def _rows_of(folder: Path, manifest: Manifest, *, in_memory: bool, verify: bool) -> IndexRows:
    if in_memory:
        return checked_index(folder, manifest, verify=verify)
    return StoredIndex(folder, manifest, verify=verify)


def _collection_at(path: Path, labels: str) -> Collection:
    return Collection(path, labels=labels)


def open_collection(
    path: str | os.PathLike[str], *, labels: str = "sorted_wnid0", verify: bool = False
) -> Collection:
    """Open the collection that :func:`collect` made in the folder ``path``.

    ``labels`` and ``verify`` are as for :func:`open_dataset`. Raises DataError for a part that is not the one
    that was collected, ManifestDamaged, UnknownVersion, OSError, and UsageError for unknown labels.
    """
    return Collection(path, labels=labels, verify=verify)


def open_records(
    path: str | os.PathLike[str],
    *,
    labels: str = "sorted_wnid0",
    cache: str | os.PathLike[str] | None = None,
    cache_limit: int | str | None = None,
) -> Dataset | Collection:
    """Open the collection in a folder, or the dataset there or at a URL. Raises what their opening raises."""
    if url_of(path) is None and is_collection(path):
        refuse_cache(path, cache, cache_limit)
        return Collection(path, labels=labels)
    return open_dataset(path, labels=labels, cache=cache, cache_limit=cache_limit)
