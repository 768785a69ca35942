"""An opened dataset: its records by number, each checked as it is read."""

from __future__ import annotations

import operator
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import ManifestDamaged
from .index import BOXES_NAME, INDEX_NAME, Rows, map_table
from .manifest import Manifest, read_manifest
from .publish import hash_file
from .record import Record
from .shard import ShardReader, open_shard


class Dataset(AbstractContextManager["Dataset"]):
    """``len(ds)``, ``ds[i]``, iteration in stored order; ``ds.manifest``, ``ds.index``, ``ds.boxes``.

    Deterministic, thread-safe, picklable (as its path), usable after a fork. Shards are opened when
    first read and stay open until :meth:`close`. Every read is checked against its CRC-32C: raises
    CorruptRecord or ShardDamaged rather than return a damaged record.
    """

    def __init__(self, path: Path, *, labels: str = "sorted_wnid0") -> None:
        self.path = path
        self.label_space = labels
        self.manifest: Manifest = read_manifest(path)
        self.index: Rows = self._table(INDEX_NAME)
        self._label_map = self.manifest.labels.mapping(labels).tolist()
        self._readers: dict[int, ShardReader] = {}
        self._lock = threading.Lock()

    def _table(self, name: str) -> Rows:
        entry = self.manifest.table(name)
        path = self.path / name
        if entry is None:
            raise ManifestDamaged(f"lists no {name}", path=self.path)
        if path.stat().st_size != entry.size or hash_file(path) != entry.sha256:
            raise ManifestDamaged("is not the table that was published; prep repair rebuilds it", path=path)
        rows = map_table(path)
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
        record = self.shard(int(row["shard"])).read(int(row["ordinal"]))
        return record._replace(label=self._label_map[record.label])

    def __iter__(self) -> Iterator[Record]:
        return (self[number] for number in range(len(self)))

    def shard(self, number: int) -> ShardReader:
        """The reader of a shard, opened when first asked for."""
        with self._lock:
            if number not in self._readers:
                entry = self.manifest.shards[number]
                self._readers[number] = open_shard(
                    self.path / entry.name, self.manifest.container, size=entry.size, records=entry.records
                )
            return self._readers[number]

    def close(self) -> None:
        """Give back files and maps; the next read opens them again."""
        with self._lock:
            readers, self._readers = self._readers, {}
        for reader in readers.values():
            reader.close()

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
