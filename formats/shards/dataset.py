"""Opened datasets: records by number, as they are, transformed or shown.

``RecordSet`` is what a loader reads: the records of one dataset or of several.

A block is a part of a dataset that an epoch reads sequentially; a shuffle takes blocks in random order. It is
a shard, or a small part of an archive, whose images are stored class by class: smaller blocks put more
classes into a shuffle window.
"""

from __future__ import annotations

import operator
import os
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from multiprocessing import parent_process
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import SourceDamaged, UsageError, printable
from shardprep.formats.images.header import CROP_READY
from shardprep.formats.images.pictures import MAX_SHOWN, Gallery, ShownImage
from shardprep.formats.records.record import LabelSpace, Record, check_transform
from shardprep.formats.records.schema import Schema
from shardprep.formats.runtime.owners import Closable, cached_property
from shardprep.formats.runtime.processes import use_one_thread
from shardprep.formats.runtime.progress import accepts_arguments
from shardprep.formats.runtime.user_paths import user_path
from shardprep.formats.runtime.work_folder import WORK_FOLDER_NAME
from shardprep.formats.shards.columns import OpenRecords, PartFiles, RecordPlace
from shardprep.formats.shards.manifest import (
    COLLECTION_NAME,
    INDEX_NAME,
    Manifest,
    box_columns,
    box_table,
    read_box_rows,
    read_index,
    read_manifest,
)
from shardprep.formats.shards.read import (
    ARCHIVE_NAME,
    LOCAL,
    MANIFEST_NAME,
    FileEntry,
    IndexedArchive,
    LocalFiles,
    Rows,
    Shard,
)

_OVERHEAD = 768  # of a tar member: its header, and padding to a multiple of 512 bytes


class Block(NamedTuple):
    """Consecutive records in one file, in ``size`` bytes from ``start``."""

    name: str
    start: int
    size: int
    records: int


def blocks_of(shards: Iterable[FileEntry]) -> tuple[Block, ...]:
    """Return one block for each shard."""
    return tuple(Block(shard.name, 0, shard.size, shard.records) for shard in shards)


def _archive_blocks(
    archive: IndexedArchive, counts: Sequence[int], lengths: npt.NDArray[np.uint32]
) -> tuple[Block, ...]:
    """Return the blocks of an archive: about ``block_bytes`` of images each, within one region.

    ``counts`` are the records of each region, ``lengths`` the images' sizes in bytes; the division depends on
    these alone. A block's start and size are estimates within its region, good enough for readahead.
    """
    blocks: list[Block] = []
    for region, stop, count in zip(archive.regions, np.cumsum(counts).tolist(), counts, strict=True):
        if count:
            inside = lengths[stop - count : stop].astype(np.int64)
            begins = np.cumsum(inside) - inside
            bounds = np.flatnonzero(np.diff(begins // archive.block_bytes, prepend=-1, append=-1))
            ends = np.append(0, np.cumsum(inside + _OVERHEAD))
            places = region.start + (ends[bounds] / ends[-1] * region.size).astype(np.int64)
            columns = (places[:-1].tolist(), np.diff(places).tolist(), np.diff(bounds).tolist())
            blocks += [Block(ARCHIVE_NAME, *block) for block in zip(*columns, strict=True)]
    return tuple(blocks)


class IndexRows(Protocol):
    """The rows of an index, as in a structured NumPy array: by number, slice, numbers or column name."""

    @property
    def dtype(self) -> np.dtype[Any]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, wanted: Any, /) -> Any: ...


@dataclass(frozen=True, eq=False)
class DatasetPart:
    """A finished dataset in a :class:`RecordSet`, and the numbers of its first record and shard there."""

    name: str
    folder: Path
    manifest: Manifest
    first_record: int = 0
    first_shard: int = 0

    @property
    def records(self) -> slice:
        return slice(self.first_record, self.first_record + self.manifest.records)

    def files(
        self, labels: str, columns: Sequence[str] | None = None, boxes: Sequence[str] | None = None
    ) -> PartFiles:
        """Return the files to read, with labels in the space ``labels``.

        ``columns`` and ``boxes`` name the columns and box columns to read; None is all. Raises UsageError for
        an unknown label space.
        """
        manifest = self.manifest
        entries = {entry.field.name: entry for entry in manifest.column_entries}
        names = entries if columns is None else columns
        box_names = box_columns(manifest) if boxes is None else tuple(boxes)
        return PartFiles(
            folder=self.folder,
            records_root=manifest.records_root,
            container=manifest.container,
            shards=manifest.shards,
            columns=tuple(entries[name] for name in names if name in entries),
            boxes=box_table(self.folder, manifest, labels) if box_names else None,
            box_columns=box_names,
        )


class RecordSet(Closable, ABC):
    """The records of one or more finished datasets (``parts``), in stored order.

    ``len``, ``[i]`` and iteration give the records, with labels in ``label_space``. ``path`` is its folder.
    ``index`` has a row for each record; its column ``shard`` counts over the shards of all parts.

    Every read is checked against its CRC-32C and the index. Raises CorruptRecord, ShardDamaged and OSError.
    Thread-safe except for :meth:`close`.
    """

    index: IndexRows

    def __init__(
        self,
        path: Path,
        parts: tuple[DatasetPart, ...],
        index: IndexRows,
        *,
        labels: str,
        files: LocalFiles = LOCAL,
    ) -> None:
        self.path = path
        self.parts = parts
        self.index = index
        self.label_space = labels
        self._label_map = self.space.mapping(labels).tolist()
        self._opened = OpenRecords([part.files(labels) for part in parts], files)

    @property
    @abstractmethod
    def root(self) -> str:
        """The digest that determines every byte of all parts: pin this string."""

    @property
    def location(self) -> str:
        """The path of its folder, or the URL it was opened by."""
        return os.fspath(self.path)

    @property
    def split(self) -> str:
        """The split of all parts; empty if they differ."""
        splits = {part.manifest.split for part in self.parts}
        return splits.pop() if len(splits) == 1 else ""

    @property
    def space(self) -> LabelSpace:
        """The classes of all parts."""
        return self.parts[0].manifest.labels

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, sorted: label *i* in ``sorted_wnid0`` is ``classes[i]``."""
        return tuple(each.name for each in self.space.classes)

    @property
    def schema(self) -> Schema:
        """The names and kinds of the columns besides key, label and image."""
        return self.parts[0].manifest.schema

    @property
    def image_bytes(self) -> int:
        """The total size of the images in bytes."""
        return sum(part.manifest.image_bytes for part in self.parts)

    @property
    def crop_ready(self) -> int:
        """The number of crop-ready images."""
        return sum(part.manifest.crop_ready for part in self.parts)

    @property
    def class_sorted(self) -> bool:
        """Whether any part stores its records class by class."""
        return any(part.manifest.class_sorted for part in self.parts)

    @property
    def in_place(self) -> bool:
        """Whether the images of any part stay in their archive."""
        return any(part.manifest.archive for part in self.parts)

    @property
    def image_files(self) -> tuple[Path, ...]:
        """The files that hold the images, in stored order."""
        return tuple(part.folder / name for part in self.parts for name in part.manifest.image_files)

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks that an epoch reads whole, in stored order: shards, or parts of an archive.

        Their names are paths relative to ``path``, or absolute.
        """
        blocks: list[Block] = []
        for part in self.parts:
            shards, archive = part.manifest.shards, part.manifest.archive
            if archive is None:
                own = blocks_of(shards)
            else:
                lengths = self.index[part.records]["length"]
                own = _archive_blocks(archive, [shard.records for shard in shards], lengths)
            blocks += self.locate(part, own)
        return tuple(blocks)

    def locate(self, part: DatasetPart, blocks: Sequence[Block]) -> Sequence[Block]:
        """Return blocks of a part, with names that lead to its folder."""
        if part.folder == self.path:
            return blocks
        return [block._replace(name=str(part.folder / block.name)) for block in blocks]

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, number: int) -> Record:
        try:
            number, count = operator.index(number), len(self.index)
        except TypeError as error:
            find = '(dataset.index["key"] == key.encode()).nonzero()[0]'
            raise TypeError(f"records are read by number, not {number!r}; of a key: {find}") from error
        if not -count <= number < count:
            raise IndexError(f"record {number} of {count}")
        key, label, shard, ordinal, length, crc32c, _, _, flags, _, _, offset = self.index[number].item()
        image = self._opened.read_image(shard, ordinal, (key, label, crc32c, offset, length))
        place = RecordPlace(number % count, shard, ordinal, key)
        is_crop_ready = bool(flags & CROP_READY)
        return self._opened.record(place, self._label_map[label], image, is_crop_ready=is_crop_ready)

    def __iter__(self) -> Iterator[Record]:
        return (self[number] for number in range(len(self)))

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), labels=self.label_space), (self.path,), self._roots()

    def _roots(self) -> list[dict[str, str]]:
        """Return the roots of each part's records, classes and columns, without those of the files."""
        return [
            {"": part.manifest.records_root + part.manifest.labels.digest}
            | {entry.field.name: entry.content_root for entry in part.manifest.column_entries}
            for part in self.parts
        ]

    def __setstate__(self, roots: list[dict[str, str]]) -> None:
        """Raise SourceDamaged if the records are not those of the pickled dataset; columns may be new."""
        own = self._roots()
        are_same = (old.items() <= new.items() for old, new in zip(roots, own, strict=False))
        if len(own) != len(roots) or not all(are_same):
            self.close()
            raise SourceDamaged("was replaced by another dataset; open it again", path=self.path)

    def show(self, records: int | Sequence[int] = 9) -> Gallery:
        """Return records to show: as pictures in a notebook, as a list in a terminal.

        ``records`` is how many to show, evenly spaced in stored order, or their numbers; at most 100. Each
        has its number, key and class below it. Raises UsageError for more, IndexError for a number that no
        record has, and the errors of reading a record.
        """
        if isinstance(records, int | np.integer):
            count = min(records, len(self))
            numbers: Sequence[int] = [place * len(self) // count for place in range(count)]
            is_possible = 1 <= count <= MAX_SHOWN
        else:
            numbers, is_possible = records, len(records) <= MAX_SHOWN
        if not is_possible:
            raise UsageError(f"{records} cannot be shown; give 1 to {MAX_SHOWN} records")
        shown = []
        for number in (range(len(self))[number] for number in numbers):
            record, label = self[number], int(self.index[number]["label"])
            named = f", {self.classes[label]}" if label >= 0 else ""
            shown.append(ShownImage(record.image, f"{number:,}: {record.key}{named}"))
        return Gallery(f"{self.path}: {len(shown)} of {len(self):,} records", shown)

    def shard(self, number: int) -> Shard:
        """Return a shard, opened on first use. Raises IndexError."""
        return self._opened.shard(number)

    def close(self) -> None:
        """Close the shards; the next read opens them again. No other thread may be reading."""
        self._opened.close()


SPLITS = ("train", "val", "test")
MARKS = (MANIFEST_NAME, INDEX_NAME, WORK_FOLDER_NAME)  # any of them marks a dataset


def splits_of(folder: str | os.PathLike[str]) -> dict[str, Path]:
    """Return the datasets in the subfolders of ``folder`` by name: train, val, test, then all others.

    They include unfinished datasets and those without a manifest, which fail when they are read. Empty if
    ``folder`` is itself a dataset or a collection, contains no dataset, or is not a folder. Raises OSError.
    ``lost+found``, at the top of a disk, is left out: only root may read it.
    """
    path = Path(folder)
    if not path.is_dir() or is_dataset(path) or is_collection(path):
        return {}
    splits = {sub.name: sub for sub in path.iterdir() if sub.name != "lost+found" and is_dataset(sub)}
    first = [name for name in SPLITS if name in splits]
    return {name: splits[name] for name in (*first, *sorted(splits.keys() - set(first)))}


def is_collection(folder: str | os.PathLike[str]) -> bool:
    """Whether the folder has a collection.json, valid or not."""
    return os.path.lexists(Path(folder) / COLLECTION_NAME)


def refuse_folder_of_splits(folder: Path) -> None:
    """Raise UsageError for a folder of splits, which it names."""
    if splits := splits_of(folder):
        names, first = ", ".join(splits), next(iter(splits.values()))
        raise UsageError(
            f"is a folder of splits ({names}); give one of them, such as {str(first)!r}", path=folder
        )


def refuse_in_dataset(output: Path) -> None:
    """Raise UsageError for an output below the folder of a dataset."""
    # two marks, because other programs write an index.npy or a manifest.json, too
    if any(sum((folder / mark).exists() for mark in MARKS) > 1 for folder in output.resolve().parents):
        raise UsageError(
            "is in the folder of a dataset, which it would damage; choose another path", path=output
        )


def is_dataset(folder: Path) -> bool:
    """Whether the folder is a dataset, even an incomplete one."""
    return folder.is_dir() and any((folder / mark).exists() for mark in MARKS)


class Dataset(RecordSet):
    """An opened dataset: its records by number, and its manifest, index and boxes.

    ``len(ds)``, ``ds[i]`` and iteration give the records in stored order. Records of a dataset with columns
    also have ``record["mask"]`` and ``record.columns``, read on access while the dataset is open. Records of
    a dataset with boxes have ``record["boxes"]``, float32 [n, 4], and ``record["box_labels"]``, int32 [n] in
    the space ``labels``.

    Deterministic, thread-safe, picklable (as its path), usable after a fork. The index is in memory; a few
    dozen shards are open at a time. Every read is checked against its CRC-32C and the index: it raises
    CorruptRecord or ShardDamaged rather than return a damaged or different record, and OSError if the system
    fails. A missing archive, or one of the wrong size, raises ShardDamaged at once. Files that change while
    the dataset is open cause errors, never a signal.

    Args:
        path: Folder of the dataset.
        labels: Label space of the records: "sorted_wnid0", "ilsvrc2012_id" or "sorted_wnid1_bg".
        verify: Whether to rehash a large index, as for :func:`open_dataset`.

    Raises:
        ManifestDamaged, UnknownVersion: The manifest cannot be read.
        UsageError: The labels are unknown, or ``path`` is a folder of splits, which it names.
        OSError: A file cannot be read.
    """

    index: Rows
    _files: LocalFiles = LOCAL

    def __init__(
        self, path: str | os.PathLike[str], *, labels: str = "sorted_wnid0", verify: bool = False
    ) -> None:
        path = user_path(path)
        refuse_folder_of_splits(path)
        self.manifest: Manifest = read_manifest(path)
        index: Rows = read_index(path, self.manifest, verify=verify)
        if self.manifest.archive:
            self.manifest.archive.check(path)
        super().__init__(
            path,
            (DatasetPart(self._name_at(path), path, self.manifest),),
            index,
            labels=labels,
            files=self._files,
        )

    def _name_at(self, path: Path) -> str:
        """Its name in ``weights``: the last component of its path or URL."""
        return path.name

    @property
    def root(self) -> str:
        """The root of the manifest, which determines every byte of the dataset."""
        return self.manifest.root

    @property
    def columns(self) -> OpenRecords:
        """The columns besides key, label and image: decoded and encoded values, and lengths, by name."""
        return self._opened

    @property
    def boxes(self) -> npt.NDArray[np.void] | None:
        """The table of boxes (record, label, x_min, y_min, x_max, y_max as fractions), or None."""
        return read_box_rows(self.path, self.manifest)

    def place(self, number: int) -> RecordPlace:
        """Return a record's place, for reading its columns."""
        number = range(len(self))[number]
        row = self.index[number]
        return RecordPlace(number, int(row["shard"]), int(row["ordinal"]), row["key"])

    def __repr__(self) -> str:
        columns = f", columns {printable(', '.join(self.schema.names), 40)}" if len(self.schema) else ""
        return f"<Dataset {self.location!r}: {len(self):,} records, {self.manifest.split}{columns}>"


def open_with_root(folder: Path, root: str) -> Dataset:
    """Open a dataset that was listed as a source. Raises SourceDamaged if its root is no longer ``root``."""
    dataset = Dataset(folder)
    if dataset.manifest.root != root:
        dataset.close()
        raise SourceDamaged("was replaced by another dataset; try again", path=folder)
    return dataset


class TransformedDataset(Closable):
    """The records of ``dataset`` by number, each as (its transformed value, its label).

    PyTorch's DataLoader takes it with any number of workers, forked or spawned; it is as picklable as
    ``dataset`` and ``transform`` are. ``transform`` is called with a record and a random generator, as in a
    Loader, or with the record alone. The generator is seeded from Python's ``random``, which DataLoader seeds
    in each worker. Errors of ``transform`` are raised unchanged, with the record's key in a note.
    :meth:`close` also closes the dataset's shards.
    """

    def __init__(self, dataset: RecordSet, transform: Callable[..., Any]) -> None:
        self.dataset = dataset
        try:
            self.transform = transform
        except UsageError:
            dataset.close()
            raise

    @property
    def transform(self) -> Callable[..., Any]:
        """The transform, which may be replaced. Raises UsageError for one of images, as timm may set."""
        return self._transform

    @transform.setter
    def transform(self, transform: Callable[..., Any]) -> None:
        check_transform(transform)
        self._transform, self._is_random = transform, accepts_arguments(transform, 2)

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, sorted."""
        return self.dataset.classes

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> tuple[Any, int]:
        record = self.dataset[number]
        _limit_threads(os.getpid())
        try:
            if not self._is_random:
                return self.transform(record), record.label
            return self.transform(record, np.random.default_rng(random.getrandbits(128))), record.label
        except Exception as error:
            error.add_note(f"In record {record.key}")
            raise

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        return (self[number] for number in range(len(self)))

    def __repr__(self) -> str:
        return f"<{self.dataset!r}, transformed by {self.transform!r}>"

    def close(self) -> None:
        """Close the dataset's shards; the next read opens them again."""
        self.dataset.close()


@lru_cache
def _limit_threads(process: int) -> None:
    """Limit a worker process to one thread: its siblings use the other CPUs."""
    if parent_process() is not None:
        use_one_thread()
