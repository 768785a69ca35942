"""An opened dataset: its records by number, each checked when it is read."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shardprep.formats.columns.box_table import OpenBoxes
from shardprep.formats.columns.column_reader import RecordPlace
from shardprep.formats.columns.open_columns import OpenColumns
from shardprep.formats.columns.schema import Schema
from shardprep.formats.containers.blocks import Block, blocks_in, blocks_of
from shardprep.formats.containers.container import ShardReader
from shardprep.formats.containers.shard_cache import Bring, OpenShards, is_there
from shardprep.formats.containers.table import Rows
from shardprep.formats.errors import SourceDamaged
from shardprep.formats.images.kinds.image_info import ImageFlag
from shardprep.formats.printable import printable
from shardprep.formats.records.record import CropReadyRecord, Record
from shardprep.formats.system.user_path import user_path

from .manifest import Manifest, read_manifest
from .splits import refuse_folder_of_splits
from .table_checks import box_columns, box_table, checked_boxes, checked_index

if TYPE_CHECKING:
    from shardprep.formats.images.gallery import Gallery


class Dataset(AbstractContextManager["Dataset"]):
    """An opened dataset: its records by number, and its manifest, index and boxes.

    ``len(ds)``, ``ds[i]`` and iteration give the records in stored order. ``path`` is the dataset's folder.
    ``labels`` is the space of the records' labels: ``sorted_wnid0``, ``ilsvrc2012_id`` or
    ``sorted_wnid1_bg``. Raises ManifestDamaged, UnknownVersion, OSError, and UsageError for unknown labels
    and for a folder of splits, which it names.

    The records of a dataset with columns also have ``record["mask"]`` and ``record.columns``, which are read
    when they are asked for, while the dataset is open. Those of a dataset with a table of boxes have
    ``record["boxes"]``, float32 [n, 4], and ``record["box_labels"]``, int32 [n] of the space ``labels``.

    Deterministic, thread-safe, picklable (as its path), usable after a fork. The index is in memory. Shards
    are opened when first read, some dozens at a time. Every read is checked against its CRC-32C and the
    index, and raises CorruptRecord or ShardDamaged rather than return a damaged or different record, and
    OSError if the system fails. Where images stay in their archive, ShardDamaged is raised at once if that is
    not there, or has another size. Files that change while the dataset is open give errors, never a signal.
    """

    _bring: Bring = staticmethod(is_there)

    def __init__(self, path: str | os.PathLike[str], *, labels: str = "sorted_wnid0") -> None:
        path = self.path = user_path(path)
        self.label_space = labels
        refuse_folder_of_splits(path)
        self.manifest: Manifest = read_manifest(path)
        self.index: Rows = checked_index(path, self.manifest)
        if self.manifest.archive:
            self.manifest.archive.check(path)
        self._label_map = self.manifest.labels.mapping(labels).tolist()
        self._shards = OpenShards(path, self.manifest.container, self.manifest.shards, self._bring)
        columns, boxes = self.manifest.columns, box_table(path, self.manifest, labels)
        others = OpenBoxes(boxes).columns(box_columns(self.manifest)) if boxes else {}
        self.columns = OpenColumns(
            path, columns.entries if columns else (), self.manifest.container, others, self._bring
        )
        """The readers of the columns beside key, label and image, by name."""

    @property
    def location(self) -> str:
        """Where the dataset is: the path of its folder, or the URL that it was opened by."""
        return os.fspath(self.path)

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks that an epoch reads whole, in stored order: shards, or parts of an archive."""
        shards, archive = self.manifest.shards, self.manifest.archive
        if archive is None:
            return blocks_of(shards)
        return blocks_in(archive, [shard.records for shard in shards], self.index["length"])

    @property
    def boxes(self) -> npt.NDArray[np.void] | None:
        """The table of boxes (record, label, x_min, y_min, x_max, y_max; fractions), None without any."""
        return checked_boxes(self.path, self.manifest)

    @property
    def schema(self) -> Schema:
        """The names and kinds of the columns beside key, label and image."""
        return self.manifest.schema

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, sorted: label *i* of ``sorted_wnid0`` is that of ``classes[i]``."""
        return tuple(each.name for each in self.manifest.labels.classes)

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, number: int) -> Record:
        number = operator.index(number)
        if not -len(self) <= number < len(self):
            raise IndexError(f"record {number} of {len(self)}")
        row = self.index[number]
        key, label, shard, ordinal, _, crc32c, *_ = row.item()
        record = self.shard(shard).read(ordinal, indexed=(key, label, crc32c))
        kind = CropReadyRecord if row["flags"] & ImageFlag.CROP_READY else Record
        found = kind(record.key, self._label_map[record.label], record.image)
        if not len(self.columns):
            return found
        return self.columns.of(found, self.place(number % len(self)))

    def place(self, number: int) -> RecordPlace:
        """Return the place of a record by its number, to read its columns."""
        row = self.index[number]
        return RecordPlace(number, int(row["shard"]), int(row["ordinal"]), row["key"])

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
        self.columns.close()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.path, self.label_space)

    def __repr__(self) -> str:
        columns = f", columns {printable(', '.join(self.schema.names), 40)}" if len(self.schema) else ""
        return f"<Dataset {self.location!r}: {len(self):,} records, {self.manifest.split}{columns}>"


def _reopen(path: Path, labels: str) -> Dataset:
    return Dataset(path, labels=labels)


def open_unreplaced(folder: Path, root: str) -> Dataset:
    """Open the dataset that was listed as a source. Raises SourceDamaged if its ``root`` is another now."""
    dataset = Dataset(folder)
    if dataset.manifest.root != root:
        dataset.close()
        raise SourceDamaged("was replaced by another dataset; repeat the command", path=folder)
    return dataset
