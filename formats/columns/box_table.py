"""The table of boxes that annotations gave, and its rows as columns of their records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardprep.formats.containers.published_file import FileEntry
from shardprep.formats.containers.table import Rows, read_table
from shardprep.formats.errors import ManifestDamaged
from shardprep.formats.records.labels import UNLABELLED

from .column_reader import RecordPlace

SIDES = ("x_min", "y_min", "x_max", "y_max")
BOX_DTYPE = np.dtype([("record", "<u4"), ("label", "<i4"), *((side, "<f4") for side in SIDES)])
BOX_COLUMNS = ("boxes", "box_labels")


@dataclass(frozen=True)
class BoxTable:
    """A dataset's table of boxes, before it is read. Picklable.

    ``entry`` is the file in ``folder``, and ``records`` the number of the dataset's records. A box of class n
    has the label ``label_map[n]``; the last one is that of a box without a class.
    """

    folder: Path
    entry: FileEntry
    records: int
    label_map: tuple[int, ...]

    def rows(self) -> Rows:
        """Read all rows: of existing records, in their order, within the image.

        Raises ManifestDamaged, OSError.
        """
        path = self.folder / self.entry.name
        rows = read_table(path, self.entry, lambda _: BOX_DTYPE)
        if len(rows) and (found := "; ".join(self._issues(rows))):
            raise ManifestDamaged(f"does not fit the manifest: {found}", path=path)
        return rows

    def _issues(self, rows: Rows) -> Iterator[str]:
        if rows["record"].max() >= self.records or (np.diff(rows["record"].astype(np.int64)) < 0).any():
            yield "its record numbers are not the dataset's in order"
        if rows["label"].min() < UNLABELLED or rows["label"].max() >= len(self.label_map) - 1:
            yield "it has labels of unknown classes"
        for low, high in (("x_min", "x_max"), ("y_min", "y_max")):
            if not ((rows[low] >= 0) & (rows[low] <= rows[high]) & (rows[high] <= 1)).all():
                yield f"it has boxes with {low} and {high} that are not fractions in order"


class _BoxArrays(NamedTuple):
    """The columns of the table, each contiguous: they are searched and cut for each record."""

    records: npt.NDArray[np.uint32]
    boxes: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int32]


class OpenBoxes:
    """The boxes of each record: ``boxes`` float32 [n, 4] and ``box_labels`` int32 [n], as BOX_COLUMNS.

    The table is read and checked when a record's boxes are first asked for, and then kept: 24 bytes a box.
    Arrays are read-only. Thread-safe. Raises ManifestDamaged, OSError.
    """

    def __init__(self, table: BoxTable) -> None:
        self._table = table
        self._read: _BoxArrays | None = None

    def columns(self, names: Iterable[str]) -> Mapping[str, Callable[[RecordPlace], Any]]:
        """Return for each of these names of BOX_COLUMNS the function from a record's place to its value."""
        return {name: partial(self._value, name) for name in names}

    def _value(self, name: str, place: RecordPlace) -> npt.NDArray[Any]:
        records, boxes, labels = self._rows()
        first, last = np.searchsorted(records, np.array([place.number, place.number + 1], np.uint32))
        return (boxes if name == BOX_COLUMNS[0] else labels)[first:last]

    def _rows(self) -> _BoxArrays:
        if self._read is None:
            rows = self._table.rows()
            boxes = np.stack([rows[side] for side in SIDES], axis=1)
            labels = np.array(self._table.label_map, np.int32)[rows["label"]]
            for array in (boxes, labels):
                array.flags.writeable = False
            self._read = _BoxArrays(np.ascontiguousarray(rows["record"]), boxes, labels)
        return self._read
