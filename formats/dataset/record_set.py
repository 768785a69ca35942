"""Records by number: what a loader reads, of one dataset or of several, one after the other."""

from __future__ import annotations

import operator
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from shardprep.formats.columns.column_reader import RecordPlace
from shardprep.formats.columns.open_columns import ChainedColumns, PartFiles
from shardprep.formats.columns.schema import Schema
from shardprep.formats.containers.blocks import Block, blocks_in, blocks_of
from shardprep.formats.containers.container import ShardReader
from shardprep.formats.containers.shard_cache import Bring, OpenShards, is_there
from shardprep.formats.images.kinds.image_info import ImageFlag
from shardprep.formats.records.labels import LabelSpace
from shardprep.formats.records.record import CropReadyRecord, Record

from .manifest import Manifest
from .table_checks import box_columns, box_table

if TYPE_CHECKING:
    from shardprep.formats.images.gallery import Gallery


class IndexRows(Protocol):
    """The rows of an index by number, in the form of NumPy's structured arrays.

    It is indexed by a number, a slice, an array of numbers, or the name of a column.
    """

    @property
    def dtype(self) -> np.dtype[Any]:
        """The columns of a row."""

    def __len__(self) -> int:
        """Number of rows."""

    def __getitem__(self, wanted: Any, /) -> Any:
        """Return a row, rows or a column."""


@dataclass(frozen=True, eq=False)
class DatasetPart:
    """A finished dataset, and the numbers of its first record and shard in a :class:`RecordSet`."""

    name: str
    folder: Path
    manifest: Manifest
    first_record: int = 0
    first_shard: int = 0

    @property
    def records(self) -> slice:
        """The numbers of its records."""
        return slice(self.first_record, self.first_record + self.manifest.records)

    def files(
        self, labels: str, columns: Sequence[str] | None = None, boxes: Sequence[str] | None = None
    ) -> PartFiles:
        """Return the files that are read, for labels of this space.

        ``columns`` and ``boxes`` are the names of the columns, and of those of the table of boxes; None is
        all. Raises UsageError for unknown labels.
        """
        manifest = self.manifest
        entries = manifest.columns.entries if manifest.columns else ()
        wanted = {entry.field.name: entry for entry in entries}
        names = tuple(wanted) if columns is None else columns
        box_names = box_columns(manifest) if boxes is None else tuple(boxes)
        return PartFiles(
            folder=self.folder,
            container=manifest.container,
            shards=manifest.shards,
            columns=tuple(wanted[name] for name in names if name in wanted),
            boxes=box_table(self.folder, manifest, labels) if box_names else None,
            box_columns=box_names,
        )


class RecordSet(ABC):
    """Records of one or more finished datasets, ``parts``, in stored order; opened to be read by number.

    ``path`` is its folder, and ``index`` has a row for each record: its column ``shard`` counts the shards
    of all parts. ``label_space`` is that of the records' labels. ``len``, ``[i]`` and iteration give the
    records.

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
        bring: Bring = is_there,
    ) -> None:
        self.path = path
        self.parts = parts
        self.index = index
        self.label_space = labels
        self._label_map = self.space.mapping(labels).tolist()
        files = [part.files(labels) for part in parts]
        self._shards = OpenShards.of_parts(
            ((part.folder, part.container, part.shards) for part in files), bring
        )
        self._columns = ChainedColumns(files, bring)

    @property
    @abstractmethod
    def root(self) -> str:
        """The digest that determines every byte of all parts: the string to pin."""

    @property
    def location(self) -> str:
        """Where it is: the path of its folder, or the URL that it was opened by."""
        return os.fspath(self.path)

    @property
    def split(self) -> str:
        """The split of all parts; empty where these differ."""
        splits = {part.manifest.split for part in self.parts}
        return splits.pop() if len(splits) == 1 else ""

    @property
    def space(self) -> LabelSpace:
        """The classes of all parts."""
        return self.parts[0].manifest.labels

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, sorted: label *i* of ``sorted_wnid0`` is that of ``classes[i]``."""
        return tuple(each.name for each in self.space.classes)

    @property
    def schema(self) -> Schema:
        """The names and kinds of the columns beside key, label and image."""
        return self.parts[0].manifest.schema

    @property
    def image_bytes(self) -> int:
        """The sum of the images' lengths in bytes."""
        return sum(part.manifest.image_bytes for part in self.parts)

    @property
    def crop_ready(self) -> int:
        """The number of crop-ready images."""
        return sum(part.manifest.crop_ready for part in self.parts)

    @property
    def class_sorted(self) -> bool:
        """Whether the records of a part are stored class after class."""
        return any(part.manifest.class_sorted for part in self.parts)

    @property
    def in_place(self) -> bool:
        """Whether images of a part stay in their archive."""
        return any(part.manifest.archive for part in self.parts)

    @property
    def image_files(self) -> tuple[Path, ...]:
        """The files that hold the images, in stored order."""
        return tuple(part.folder / name for part in self.parts for name in part.manifest.image_files)

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks that an epoch reads whole, in stored order: shards, or parts of an archive.

        Their names are paths from the folder ``path``, or absolute ones.
        """
        return tuple(block for part in self.parts for block in self._blocks_of(part))

    def _blocks_of(self, part: DatasetPart) -> Sequence[Block]:
        shards, archive = part.manifest.shards, part.manifest.archive
        if archive is None:
            blocks = blocks_of(shards)
        else:
            lengths = self.index[part.records]["length"]
            blocks = blocks_in(archive, [shard.records for shard in shards], lengths)
        return self.placed(part, blocks)

    def placed(self, part: DatasetPart, blocks: Sequence[Block]) -> Sequence[Block]:
        """Return blocks of a part with names that lead to its folder."""
        if part.folder == self.path:
            return blocks
        return [block._replace(name=str(part.folder / block.name)) for block in blocks]

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, number: int) -> Record:
        number = operator.index(number)
        if not -len(self) <= number < len(self):
            raise IndexError(f"record {number} of {len(self)}")
        row = self.index[number % len(self)]
        key, label, shard, ordinal, _, crc32c, *_ = row.item()
        record = self.shard(shard).read(ordinal, indexed=(key, label, crc32c))
        kind = CropReadyRecord if row["flags"] & ImageFlag.CROP_READY else Record
        found = kind(record.key, self._label_map[record.label], record.image)
        if not len(self._columns):
            return found
        return self._columns.of(found, RecordPlace(number % len(self), shard, ordinal, key))

    def __iter__(self) -> Iterator[Record]:
        return (self[number] for number in range(len(self)))

    def show(self, records: int | Sequence[int] = 9) -> Gallery:
        """Return records that a notebook shows as pictures, and a terminal as a list.

        ``records`` is a number of records, evenly chosen in stored order, or the record numbers; at most 100.
        Below each is its number, its key and its class. Raises UsageError for more, IndexError for a number
        that no record has, and what reading a record raises.
        """
        from .shown_records import shown_records  # needs OpenCV, which reading does without

        return shown_records(self, records)

    def shard(self, number: int) -> ShardReader:
        """Return the reader of a shard, opened at its first use."""
        return self._shards[number]

    def close(self) -> None:
        """Close the shards; the next read opens them again. No other thread may be reading."""
        self._shards.close()
        self._columns.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
