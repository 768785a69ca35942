"""An opened dataset: its records by number, each checked when it is read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.formats.columns.column_reader import RecordPlace
from shardprep.formats.columns.open_columns import OpenColumns
from shardprep.formats.containers.shard_cache import Bring, is_there
from shardprep.formats.containers.table import Rows
from shardprep.formats.errors import SourceDamaged
from shardprep.formats.printable import printable
from shardprep.formats.system.user_path import user_path

from .manifest import Manifest, read_manifest
from .record_set import DatasetPart, RecordSet
from .splits import refuse_folder_of_splits
from .table_checks import checked_boxes, checked_index


class Dataset(RecordSet):
    """An opened dataset: its records by number, and its manifest, index and boxes.

    ``len(ds)``, ``ds[i]`` and iteration give the records in stored order. ``path`` is the dataset's folder.
    ``labels`` is the space of the records' labels: ``sorted_wnid0``, ``ilsvrc2012_id`` or
    ``sorted_wnid1_bg``. ``verify`` is as for :func:`open_dataset`. Raises ManifestDamaged, UnknownVersion,
    OSError, and UsageError for unknown labels and for a folder of splits, which it names.

    The records of a dataset with columns also have ``record["mask"]`` and ``record.columns``, which are read
    when they are asked for, while the dataset is open. Those of a dataset with a table of boxes have
    ``record["boxes"]``, float32 [n, 4], and ``record["box_labels"]``, int32 [n] of the space ``labels``.

    Deterministic, thread-safe, picklable (as its path), usable after a fork. The index is in memory. Shards
    are opened when first read, some dozens at a time. Every read is checked against its CRC-32C and the
    index, and raises CorruptRecord or ShardDamaged rather than return a damaged or different record, and
    OSError if the system fails. Where images stay in their archive, ShardDamaged is raised at once if that is
    not there, or has another size. Files that change while the dataset is open give errors, never a signal.
    """

    index: Rows
    _bring: Bring = staticmethod(is_there)

    def __init__(
        self, path: str | os.PathLike[str], *, labels: str = "sorted_wnid0", verify: bool = False
    ) -> None:
        path = user_path(path)
        refuse_folder_of_splits(path)
        self.manifest: Manifest = read_manifest(path)
        index: Rows = checked_index(path, self.manifest, verify=verify)
        if self.manifest.archive:
            self.manifest.archive.check(path)
        super().__init__(
            path,
            (DatasetPart(self._name_at(path), path, self.manifest),),
            index,
            labels=labels,
            bring=self._bring,
        )

    def _name_at(self, path: Path) -> str:
        """The name by which weights know it: the end of its path, or of its URL."""
        return path.name

    @property
    def root(self) -> str:
        """The root of the manifest, which determines every byte of the dataset."""
        return self.manifest.root

    @property
    def columns(self) -> OpenColumns:
        """The readers of the columns beside key, label and image, by name."""
        return self._columns.part(0)

    @property
    def boxes(self) -> npt.NDArray[np.void] | None:
        """The table of boxes (record, label, x_min, y_min, x_max, y_max; fractions), None without any."""
        return checked_boxes(self.path, self.manifest)

    def place(self, number: int) -> RecordPlace:
        """Return the place of a record by its number, to read its columns."""
        row = self.index[number]
        return RecordPlace(number, int(row["shard"]), int(row["ordinal"]), row["key"])

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
