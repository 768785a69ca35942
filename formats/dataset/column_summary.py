"""The summary of a dataset's columns, from the manifest and the columns' tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.formats.columns.column_entry import ColumnEntry
from shardprep.formats.columns.column_reader import ColumnReader

from .dataset import Dataset


@dataclass(frozen=True)
class ColumnSummary:
    """A column: its ``name`` and ``kind``, the ``bytes`` of all values, and the ``disk_bytes`` of its files.

    ``lengths`` are (5 %, median, 95 %, largest) of the values' bytes, None where all have the same number.
    Of a column with classes, ``classes`` is their number, else 0. Of one with a single label, ``per_class``
    are the fewest and most records of the classes that occur, and ``unlabelled`` the number of records
    without a label; both are None for other kinds.
    """

    name: str
    kind: str
    bytes: int
    disk_bytes: int
    lengths: tuple[int, int, int, int] | None
    classes: int
    per_class: tuple[int, int] | None
    unlabelled: int | None


def column_summaries(dataset: Dataset) -> tuple[ColumnSummary, ...]:
    """Return the summaries of all columns; no shard is read. Raises ManifestDamaged, OSError."""
    return tuple(_summaries(dataset))


def _summaries(dataset: Dataset) -> Iterator[ColumnSummary]:
    columns = dataset.manifest.columns
    for entry in columns.entries if columns else ():
        reader, field = dataset.columns[entry.field.name], entry.field
        lengths = reader.lengths()
        counts = _label_counts(entry, reader)
        present = counts[1:][counts[1:] > 0] if counts is not None else ()
        yield ColumnSummary(
            name=field.name,
            kind=field.kind,
            bytes=int(lengths.sum(dtype=np.int64)),
            disk_bytes=sum(file.size for file in entry.files),
            lengths=None if field.is_fixed else spread(lengths),
            classes=len(field.classes),
            per_class=(int(min(present)), int(max(present))) if len(present) else None,
            unlabelled=None if counts is None else int(counts[0]),
        )


def _label_counts(entry: ColumnEntry, reader: ColumnReader) -> npt.NDArray[np.int64] | None:
    """Return the number of records without a label, and of each class; None for another kind of column."""
    if entry.field.kind != "label":
        return None
    labels = np.clip(reader.table()["value"], -1, len(entry.field.classes) - 1)
    return np.bincount(labels + 1, minlength=len(entry.field.classes) + 1)


def spread(column: np.ndarray[Any, Any]) -> tuple[int, int, int, int]:
    """Return the smallest value but 5 %, the median, the largest but 5 %, and the largest."""
    low, middle, high, largest = np.percentile(column, [5, 50, 95, 100])
    return int(low), int(middle), int(high), int(largest)
