"""An opened dataset: its records by number, each checked as it is read."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import ManifestDamaged
from .index import BOXES_NAME, INDEX_NAME, Rows, map_index, map_table
from .manifest import Manifest, read_manifest
from .open_shards import OpenShards
from .publish import hash_file
from .record import Record
from .shard import ShardReader


class Dataset(AbstractContextManager["Dataset"]):
    """``len(ds)``, ``ds[i]``, iteration in stored order; ``ds.manifest``, ``ds.index``, ``ds.boxes``.

    Deterministic, thread-safe, picklable (as its path), usable after a fork. Shards are opened when
    first read, some dozens at a time. Every read is checked against its CRC-32C and the index: raises
    CorruptRecord or ShardDamaged rather than return a damaged record, or another one.
    """

    def __init__(self, path: Path, *, labels: str = "sorted_wnid0") -> None:
        self.path = path
        self.label_space = labels
        self.manifest: Manifest = read_manifest(path)
        self.index: Rows = self._table(INDEX_NAME, map_index)
        self._label_map = self.manifest.labels.mapping(labels).tolist()
        self._shards = OpenShards(path, self.manifest.container, self.manifest.shards)

    def _table(self, name: str, mapped: Callable[[Path], Rows] = map_table) -> Rows:
        entry = self.manifest.table(name)
        path = self.path / name
        if entry is None:
            raise ManifestDamaged(f"lists no {name}", path=self.path)
        if path.stat().st_size != entry.size or hash_file(path) != entry.sha256:
            raise ManifestDamaged("is not the table that was published; prep repair rebuilds it", path=path)
        rows = mapped(path)
        if len(rows) != entry.records:
            raise ManifestDamaged(f"has {len(rows)} rows, not {entry.records}", path=path)
        return rows

    @property
    def boxes(self) -> npt.NDArray[np.void] | None:
        """The table of boxes (record, label, x_min, y_min, x_max, y_max; fractions), None without one."""
        return self._table(BOXES_NAME) if self.manifest.table(BOXES_NAME) else None

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, number: int) -> Record:
        number = operator.index(number)
        if not -len(self) <= number < len(self):
            raise IndexError(f"record {number} of {len(self)}")
        row = self.index[number]
        record = self.shard(int(row["shard"])).read(int(row["ordinal"]), crc32c=int(row["crc32c"]))
        return record._replace(label=self._label_map[record.label])

    def __iter__(self) -> Iterator[Record]:
        return (self[number] for number in range(len(self)))

    def shard(self, number: int) -> ShardReader:
        """The reader of a shard, opened when first asked for."""
        return self._shards[number]

    def close(self) -> None:
        """Give back files and maps; the next read opens them again. No other thread may be reading."""
        self._shards.close()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.path, self.label_space)

    def __repr__(self) -> str:
        return f"<Dataset {os.fspath(self.path)!r}: {len(self)} records, {self.manifest.root}>"


def _reopen(path: Path, labels: str) -> Dataset:
    return Dataset(path, labels=labels)


def open_dataset(path: str | os.PathLike[str], *, labels: str = "sorted_wnid0") -> Dataset:
    """Open a converted split.

    ``labels`` is the space that records' labels are given in: ``sorted_wnid0``, ``ilsvrc2012_id`` or
    ``sorted_wnid1_bg``. Raises ManifestDamaged, UnknownVersion, UsageError, OSError.
    """
    return Dataset(Path(path), labels=labels)
