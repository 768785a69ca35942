"""An index with rows that stay in their file, and are read by position: for collections of many records."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.formats.containers.published_file import published_file
from shardprep.formats.containers.table import Rows, table_header
from shardprep.formats.dataset.index import INDEX_NAME, index_row_of
from shardprep.formats.dataset.manifest import Manifest
from shardprep.formats.dataset.table_checks import checked_index
from shardprep.formats.errors import ManifestDamaged
from shardprep.formats.records.labels import UNLABELLED
from shardprep.formats.system.positional import read_at, read_into
from shardprep.formats.system.seal import Seal

from .row_numbers import row_numbers

HEADER_BYTES = 4096  # at the most
ROWS_AT_ONCE = 1 << 16


class StoredIndex:
    """The rows of one dataset's index, read from its file when they are asked for.

    The file was verified before, as its :class:`.Seal` says, or is when this is made: it is hashed, and read
    into memory for that time, or always with ``verify``. From then on each read is of that very file, by its
    inode, size and times, and each row is checked to be of its record. Raises ManifestDamaged, OSError.
    """

    def __init__(self, folder: Path, manifest: Manifest, *, verify: bool = False) -> None:
        self._path = folder / INDEX_NAME
        self._records = manifest.records
        self._classes = len(manifest.labels)
        self._ends = np.cumsum([shard.records for shard in manifest.shards])
        with published_file(self._path) as descriptor:
            status = os.fstat(descriptor)
            if verify or not self._is_sealed(manifest, status):
                checked_index(folder, manifest, verify=verify)
            self._known = _identity(status)
            self._dtype, self._start = self._form(descriptor)

    def _is_sealed(self, manifest: Manifest, status: os.stat_result) -> bool:
        entry = manifest.table(INDEX_NAME)
        is_it = entry is not None and (entry.size, entry.records) == (status.st_size, manifest.records)
        return is_it and Seal(status, manifest.root).holds

    def _form(self, descriptor: int) -> tuple[np.dtype[np.void], int]:
        """Return the columns of a row, and where the first one begins."""
        begin = read_at(descriptor, HEADER_BYTES, 0)
        start = 10 + int.from_bytes(begin[8:10], "little")
        row = index_row_of((os.fstat(descriptor).st_size - start) // max(1, self._records))
        if row is None or begin[:start] != table_header(row, self._records):
            raise ManifestDamaged(f"is not an index of {self._records} rows", path=self._path)
        return row, start

    @property
    def dtype(self) -> np.dtype[np.void]:
        """The columns of a row."""
        return self._dtype

    def __len__(self) -> int:
        return self._records

    def __getitem__(self, wanted: Any, /) -> Any:
        if isinstance(wanted, str):
            return self._column(wanted)
        if isinstance(wanted, slice):
            start, stop, step = wanted.indices(self._records)
            return (
                self._run(start, max(start, stop))[::step] if step > 0 else self[np.arange(start, stop, step)]
            )
        rows = self._rows(row_numbers(wanted, self._records))
        return rows if isinstance(wanted, (np.ndarray, list)) else rows[0]

    def _column(self, name: str) -> npt.NDArray[Any]:
        """Return a column of all rows; the others are not in memory together."""
        found = np.empty(self._records, self._dtype[name])
        for start in range(0, self._records, ROWS_AT_ONCE):
            stop = min(start + ROWS_AT_ONCE, self._records)
            found[start:stop] = self._run(start, stop)[name]
        return found

    def _run(self, start: int, stop: int) -> Rows:
        """Return adjacent rows."""
        rows = np.empty(stop - start, self._dtype)
        with published_file(self._path) as descriptor:
            self._fill(descriptor, rows, start)
            self._refuse_changed(descriptor)
        return self._checked(rows, np.arange(start, stop))

    def _rows(self, numbers: npt.NDArray[np.int64]) -> Rows:
        """Return rows in any order."""
        rows = np.empty(len(numbers), self._dtype)
        with published_file(self._path) as descriptor:
            for place, number in enumerate(numbers.tolist()):
                self._fill(descriptor, rows[place : place + 1], number)
            self._refuse_changed(descriptor)
        return self._checked(rows, numbers)

    def _fill(self, descriptor: int, rows: Rows, first: int) -> None:
        memory = rows.view(np.uint8).data
        if read_into(descriptor, memory, self._start + first * self._dtype.itemsize) != len(memory):
            raise self._changed()

    def _refuse_changed(self, descriptor: int) -> None:
        if _identity(os.fstat(descriptor)) != self._known:
            raise self._changed()

    def _checked(self, rows: Rows, numbers: npt.NDArray[np.int64]) -> Rows:
        """Check that rows are those of their records: bytes on a disk can change without a new time."""
        shards = np.searchsorted(self._ends, numbers, side="right")
        ordinals = numbers - np.append(0, self._ends)[shards]
        labels = rows["label"]
        is_known = (labels >= UNLABELLED) & (labels < self._classes)
        if not ((rows["shard"] == shards) & (rows["ordinal"] == ordinals) & is_known).all():
            raise self._changed()
        return rows

    def _changed(self) -> ManifestDamaged:
        return ManifestDamaged(
            "changed since it was verified; prep verify says what is wrong", path=self._path
        )


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
