"""Opening datasets by path or URL, and collections: several finished datasets as one.

A collection is listed in a file, under one root.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, pairwise, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import DataError, DatasetNotFound, ManifestDamaged, OutputBusy, UsageError
from shardprep.formats.runtime.files import publish_bytes, read_at, read_into
from shardprep.formats.runtime.json_record import JsonRecord, canonical_json, sha256_of
from shardprep.formats.runtime.progress import byte_count, count_of
from shardprep.formats.runtime.user_paths import user_path, user_paths
from shardprep.formats.runtime.work_folder import PLAN_NAME, WORK_FOLDER_NAME, WorkFolder, remove_leftover
from shardprep.formats.shards.dataset import (
    Dataset,
    DatasetPart,
    IndexRows,
    RecordSet,
    TransformedDataset,
    is_collection,
    refuse_folder_of_splits,
    refuse_in_dataset,
    splits_of,
)
from shardprep.formats.shards.manifest import (
    COLLECTION_NAME,
    INDEX_NAME,
    Manifest,
    index_dtype,
    read_index,
    read_manifest,
)
from shardprep.formats.shards.read import MANIFEST_NAME, Rows, Seal, file_state, open_published
from shardprep.formats.storage.store import Location, path_or_place

if TYPE_CHECKING:
    from shardprep.formats.storage.cache import FileSource


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
    source = cached_place(path, cache, cache_limit)
    if source is None:
        dataset = Dataset(path, labels=labels, verify=verify)
    else:
        from shardprep.formats.storage.cache import CachedDataset  # start-up time: asyncio

        dataset = CachedDataset(source, labels=labels)
    return dataset if transform is None else TransformedDataset(dataset, transform)


def datasets_in(path: str | os.PathLike[str]) -> dict[str, Path | str]:
    """Return the splits in a folder or at a URL, by name; empty for a single dataset.

    Raises NothingThere, RemoteFailed, ManifestDamaged, OSError.
    """
    place = path_or_place(path)
    if isinstance(place, Path):
        return {**splits_of(place)}
    from shardprep.formats.storage.transfer import datasets_at  # start-up time: asyncio

    return {name: place.child(name).url for name in datasets_at(place) if name}


def cached_place(
    path: str | os.PathLike[str], cache: str | os.PathLike[str] | None, cache_limit: int | str | None
) -> FileSource | None:
    """Return the place of a URL with its cache and limit; None for a path.

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
        limit = None if cache_limit is None else byte_count(cache_limit, of="cache_limit")
        from shardprep.formats.storage.cache import FileSource  # start-up time: asyncio

        return FileSource(place, user_path(cache).absolute(), limit)
    if cache is not None or cache_limit is not None:
        raise UsageError(
            "is not a URL: a dataset on this machine is read in place, without a cache", path=path
        )
    return None


def describe_conflict(names: Sequence[str], manifests: Sequence[Manifest]) -> str:
    """Describe the first difference between parts that training cannot handle; empty for none.

    Classes and their ids, the schemas of columns, and whether records have images must be equal.
    """
    for name, manifest in zip(names[1:], manifests[1:], strict=True):
        for mine, theirs in zip_longest(_traits(manifests[0]), _traits(manifest), fillvalue="no such column"):
            if mine != theirs:
                return f"{names[0]} and {name} cannot be one collection: one has {mine}, the other {theirs}"
    return ""


def _traits(manifest: Manifest) -> Iterator[str]:
    """Yield what must be equal in all parts, in words."""
    yield count_of(len(manifest.labels), "class")
    for label, each in enumerate(manifest.labels.classes):
        yield f"the label {label} for {each.name!r} with the ILSVRC2012_ID {each.ilsvrc2012_id}"
    yield "images" if manifest.has_images else "no images"
    for field in manifest.schema:
        yield f"the column {field.name} ({field.kind})"
        for number, name in enumerate(field.classes):
            yield f"the class {number} {name!r} of the column {field.name}"


MAX_PARTS = 4096
MAX_TEXT = 4096  # characters of a name or a path: the longest path of Linux


@dataclass(frozen=True)
class PartEntry:
    """A part in the file: a finished dataset.

    ``path`` is its folder, absolute or relative to the collection's. ``bytes`` is the total size of its
    files, including an archive with its images.
    """

    name: str
    path: str
    root: str
    content_root: str
    records: int
    bytes: int

    def __post_init__(self) -> None:
        for text in (self.name, self.path):
            if not 0 < len(text) <= MAX_TEXT or b"\0" in os.fsencode(text):
                raise ValueError(f"{text[:100]!r} cannot be a path")

    @classmethod
    def of(cls, name: str, path: str, manifest: Manifest) -> PartEntry:
        return cls(name, path, manifest.root, manifest.content_root, manifest.records, manifest.size)

    def folder(self, collection: Path) -> Path:
        """Return the part's folder, without ``..`` unless a link makes that another folder."""
        path = collection / self.path
        normal = Path(os.path.normpath(path))
        return normal if normal.resolve() == path.resolve() else path

    def manifest(self, collection: Path) -> Manifest:
        """Return the part's manifest. Raises DataError, naming the part, if it is not the listed one."""
        folder = self.folder(collection)
        try:
            manifest = read_manifest(folder)
        except (DatasetNotFound, ManifestDamaged) as error:
            raise ManifestDamaged(f"the part {self.name}: {error.message}", path=folder) from error
        if PartEntry.of(self.name, self.path, manifest) != self:
            raise DataError(
                f"the part {self.name} is not the dataset that was collected: its root is {manifest.root}, not "
                f"{self.root}; put that dataset there, or repeat prep collect in another folder",
                path=folder,
            )
        return manifest


@dataclass(frozen=True)
class CollectionFile(JsonRecord):
    """The contents of collection.json: the parts in order, and their root."""

    KIND = "collection"
    ADVICE = "repeat prep collect in another folder"
    MAX_BYTES = 4 << 20

    parts: tuple[PartEntry, ...]
    root: str

    def __post_init__(self) -> None:
        names = {part.name for part in self.parts if part.records}
        if not 0 < len(names) == len(self.parts) <= MAX_PARTS:
            raise ValueError(f"it does not have 1 to {MAX_PARTS} named parts with records")
        if self.root != collection_root(self.parts):
            raise ValueError("it does not match its own root: it was changed after it was made")


def collection_root(parts: Iterable[PartEntry]) -> str:
    """Return the SHA-256 over names, roots, content roots and record counts of the parts, in order.

    Paths are not included: a collection keeps its root when it is moved.
    """
    return sha256_of([[part.name, part.root, part.content_root, part.records] for part in parts])


def read_collection(folder: Path) -> CollectionFile:
    """Return the collection in a folder.

    Raises DatasetNotFound, ManifestDamaged, UnknownVersion, OSError, and UsageError for any other folder.
    """
    if not folder.is_dir():
        raise DatasetNotFound.at(folder)
    if not is_collection(folder):
        raise UsageError("is not a collection; in Python, open_dataset() reads a dataset", path=folder)
    try:
        return CollectionFile.load(folder / COLLECTION_NAME)
    except DataError as error:
        raise ManifestDamaged(error.message, path=error.path) from error


MAX_INDEX_BYTES = 1 << 30  # of all indexes held in memory: 18 million records; larger ones stay in files
ROWS_AT_ONCE = 1 << 16


def combine_indexes(parts: Sequence[DatasetPart], *, verify: bool) -> IndexRows:
    """Return the concatenated index rows of all parts, in memory unless there are too many.

    The column ``shard`` counts over the shards of all parts, and keys have the largest width of any part.
    Raises ShardDamaged for an archive that is not the indexed one, ManifestDamaged, OSError.
    """
    for part in parts:
        if part.manifest.archive:
            part.manifest.archive.check(part.folder)
    entries = [part.manifest.table(INDEX_NAME) for part in parts]
    if sum(entry.size for entry in entries if entry) > MAX_INDEX_BYTES:
        return StoredIndex(parts, verify=verify)
    indexes = [read_index(part.folder, part.manifest, verify=verify) for part in parts]
    rows = np.zeros(sum(map(len, indexes)), index_dtype(max(each.dtype["key"].itemsize for each in indexes)))
    for part in parts:
        _copy_rows(rows, part.records, part, indexes.pop(0))
    rows.flags.writeable = False
    return rows


def _copy_rows(rows: Rows, where: slice | npt.NDArray[np.int64], part: DatasetPart, own: Rows) -> None:
    """Copy a part's rows into the combined rows; its keys may be shorter, and offsets missing."""
    for name in own.dtype.names or ():
        rows[name][where] = own[name]
    rows["shard"][where] += np.uint32(part.first_shard)


class StoredIndex:
    """The indexes of several datasets, whose rows are read from their files on access.

    Each file is verified on construction, in memory, unless a :class:`.Seal` shows that it was before and
    ``verify`` is False. Then each read requires the same inode, size and times. Raises ManifestDamaged,
    OSError.
    """

    def __init__(self, parts: Sequence[DatasetPart], *, verify: bool = False) -> None:
        self._files = [_IndexFile(part, verify=verify) for part in parts]
        self._ends = np.cumsum([part.manifest.records for part in parts])
        self.dtype = index_dtype(max(file.row["key"].itemsize for file in self._files))

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, wanted: Any, /) -> Any:
        if isinstance(wanted, str):
            column = np.empty(len(self), self.dtype[wanted])
            for start in range(0, len(self), ROWS_AT_ONCE):
                numbers = np.arange(start, min(start + ROWS_AT_ONCE, len(self)))
                column[numbers] = self._rows(numbers)[wanted]
            return column
        if isinstance(wanted, slice):
            return self._rows(np.arange(*wanted.indices(len(self))))
        numbers = np.asarray(wanted)
        np.broadcast_to(np.int8(0), len(self))[wanted]  # raises IndexError as any array does
        if numbers.dtype == bool:
            numbers = np.flatnonzero(numbers)
        rows = self._rows(np.atleast_1d(numbers.astype(np.int64) % len(self)))
        return rows if numbers.ndim else rows[0]

    def _rows(self, numbers: npt.NDArray[np.int64]) -> Rows:
        """Return rows in any order, reading those of each part together."""
        rows = np.zeros(len(numbers), self.dtype)
        parts = np.searchsorted(self._ends, numbers, side="right")
        for number in np.unique(parts).tolist():
            file, mine = self._files[number], np.flatnonzero(parts == number)
            _copy_rows(rows, mine, file.part, file.read(numbers[mine] - file.part.first_record))
        return rows


class _IndexFile:
    """The index of one dataset in a :class:`StoredIndex`."""

    def __init__(self, part: DatasetPart, *, verify: bool) -> None:
        self.part, self._path, manifest = part, part.folder / INDEX_NAME, part.manifest
        with open_published(self._path) as descriptor:
            status = os.fstat(descriptor)
            if verify or not Seal(status, manifest.root).is_valid:
                read_index(part.folder, manifest, verify=verify)
            self._known = file_state(status)
            self._start = 10 + int.from_bytes(read_at(descriptor, 2, 8), "little")  # after the header
        width = (status.st_size - self._start) // manifest.records
        spare = index_dtype(1, offsets=manifest.offsets).itemsize - 1
        self.row = index_dtype(width - spare, offsets=manifest.offsets)

    def read(self, numbers: npt.NDArray[np.int64]) -> Rows:
        """Return rows in any order; adjacent ones are read together."""
        rows = np.empty(len(numbers), self.row)
        runs = np.flatnonzero(np.diff(numbers, prepend=-2) != 1).tolist()
        with open_published(self._path) as descriptor:
            for first, last in pairwise([*runs, len(numbers)]):
                memory = rows[first:last].view(np.uint8).data
                offset = self._start + int(numbers[first]) * self.row.itemsize
                read_into(descriptor, memory, offset)  # a short read has changed the size
            if file_state(os.fstat(descriptor)) != self._known:
                issue = "changed since it was verified; prep verify shows what is wrong"
                raise ManifestDamaged(issue, path=self._path)
        return rows


class Collection(RecordSet):
    """An opened collection, whose records are numbered across all ``parts``, in order.

    Each part is a finished dataset: ``part.name``, ``part.folder``, ``part.manifest``, and the numbers of its
    first record and shard. ``len``, ``[i]``, iteration, ``index``, ``classes``, ``schema``, ``label_space``
    are as for a :class:`.Dataset`; ``index`` takes a number, a slice, an array of numbers or a column's name,
    and its column ``shard`` counts over the shards of all parts. Indexes of more than 1 GiB together stay in
    their files; reading a whole column loads that column.

    Args:
        path: Folder of the collection.
        labels: Label space of the records, as for :func:`open_dataset`.
        verify: Whether to rehash large indexes, as for :func:`open_dataset`.

    Raises:
        DataError: A part, which is named, is not the one that was collected.
        UsageError: The labels are unknown, or the folder holds no collection. Other errors are a Dataset's.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, labels: str = "sorted_wnid0", verify: bool = False
    ) -> None:
        path = user_path(path)
        self._file = read_collection(path)
        manifests = [entry.manifest(path) for entry in self._file.parts]
        names = [entry.name for entry in self._file.parts]
        if difference := describe_conflict(names, manifests):
            raise ManifestDamaged(difference, path=path / COLLECTION_NAME)
        folders = [entry.folder(path) for entry in self._file.parts]
        first_records = accumulate((each.records for each in manifests), initial=0)
        first_shards = accumulate((len(each.shards) for each in manifests), initial=0)
        parts = tuple(map(DatasetPart, names, folders, manifests, first_records, first_shards))
        super().__init__(path, parts, combine_indexes(parts, verify=verify), labels=labels)

    @property
    def root(self) -> str:
        """The root of the collection: a hash over the roots of all parts, in order."""
        return self._file.root

    def __repr__(self) -> str:
        return f"<Collection {os.fspath(self.path)!r}: {count_of(len(self), 'record')} in {count_of(len(self.parts), 'part')}>"


def open_collection(
    path: str | os.PathLike[str], *, labels: str = "sorted_wnid0", verify: bool = False
) -> Collection:
    """Open the collection that :func:`collect` made.

    Args:
        path: Folder of the collection.
        labels: Label space of the records, as for :func:`open_dataset`.
        verify: Whether to rehash large indexes, as for :func:`open_dataset`.

    Returns:
        The opened collection.

    Raises:
        DataError: A part is not the one that was collected.
        ManifestDamaged, UnknownVersion: A manifest cannot be read.
        UsageError: The labels are unknown, or the folder holds no collection.
        OSError: A file cannot be read.
    """
    return Collection(path, labels=labels, verify=verify)


def open_records(
    path: str | os.PathLike[str],
    *,
    labels: str = "sorted_wnid0",
    cache: str | os.PathLike[str] | None = None,
    cache_limit: int | str | None = None,
) -> Dataset | Collection:
    """Open the collection or dataset in a folder, or the dataset at a URL."""
    if cached_place(path, cache, cache_limit) is None and is_collection(path):
        return Collection(path, labels=labels)
    return open_dataset(path, labels=labels, cache=cache, cache_limit=cache_limit)


def collect(out: str | os.PathLike[str], parts: Iterable[str | os.PathLike[str]]) -> Collection:
    """Combine finished datasets into one collection, and open it.

    The folder gets one file, ``collection.json``; nothing is copied. A part is named by the shortest unique
    end of its path. Parts below or beside ``out`` are found by a relative path, and may be moved with it;
    others by their absolute path. An existing collection is replaced only by an equal one.

    Args:
        out: Folder of the collection.
        parts: Folders of the datasets, in order.

    Returns:
        The opened collection.

    Raises:
        UsageError: The parts do not agree in classes, columns, or whether they have images; a part is given
            twice, or none is given; ``out`` has another collection, a dataset or unfinished work.
        ManifestDamaged, UnknownVersion: A manifest cannot be read.
        OSError: A file cannot be read or written.
    """
    folder, folders = user_path(out), user_paths(parts, "parts")
    if not 0 < len(folders) <= MAX_PARTS:
        raise UsageError(f"a collection has 1 to {MAX_PARTS} parts, not {len(folders)}")
    for part in folders:
        refuse_folder_of_splits(part)
    names, manifests = _part_names(folders), [read_manifest(part) for part in folders]
    roots = [manifest.root for manifest in manifests]
    for name, root in zip(names, roots, strict=True):
        if roots.count(root) > 1:
            raise UsageError(f"{name} is given twice, or equals another part: its root is {root}")
    if different := describe_conflict(names, manifests):
        raise UsageError(different)
    places = [_part_path(part, folder) for part in folders]
    entries = tuple(map(PartEntry.of, names, places, manifests))
    file = CollectionFile(entries, collection_root(entries))
    if (folder / MANIFEST_NAME).exists():
        raise UsageError("holds a dataset; make the collection in another folder", path=folder)
    refuse_in_dataset(folder)
    if (folder / WORK_FOLDER_NAME / PLAN_NAME).exists():
        raise UsageError("holds unfinished work; make the collection in another folder", path=folder)
    try:
        if not _has_collection(folder, file):
            with WorkFolder(folder, shared=True) as work_folder:
                publish_bytes(folder / COLLECTION_NAME, canonical_json(file.to_json()), work_folder.run)
    except OutputBusy:  # an equal call may just be removing the work folder
        if not _has_collection(folder, file):
            raise
    with suppress(OutputBusy):  # the last of several calls at once removes it
        remove_leftover(folder)
    return open_collection(folder)


def _has_collection(folder: Path, wanted: CollectionFile) -> bool:
    """Whether the folder has this collection. Raises UsageError for another one."""
    if not is_collection(folder):
        return False
    if (folder / COLLECTION_NAME).read_bytes() != canonical_json(wanted.to_json()):
        raise UsageError("holds another collection; choose another folder, or remove it first", path=folder)
    return True


def _part_names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest unique ends of the paths. Raises UsageError for equal paths."""
    whole = [folder.absolute().parts[1:] for folder in folders]
    for count in range(1, max(map(len, whole)) + 1):
        names = ["/".join(parts[-count:]) for parts in whole]
        if len(set(names)) == len(names):
            return names
    raise UsageError(f"{max(folders, key=folders.count)} is given twice; give each part once")


def _part_path(folder: Path, out: Path) -> str:
    """Return a part's path in the file: relative below or beside the collection, else absolute."""
    part, here = folder.resolve(), out.resolve()
    return os.path.relpath(part, here) if here.parent in part.parents else str(part)
