"""The open columns of a dataset, by name, and those of several datasets."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from shardprep.formats.containers.published_file import FileEntry
from shardprep.formats.containers.shard_cache import MAX_OPEN, Bring, is_there
from shardprep.formats.records.record import NO_COLUMNS, Record
from shardprep.formats.system.owned import Owned

from .box_table import BoxTable, OpenBoxes
from .column_entry import ColumnEntry
from .column_reader import ColumnReader, RecordPlace
from .column_record import ColumnRecord, ColumnValues

MOST_PARTS = 32  # of which columns are open at a time


class OpenColumns(Owned):
    """Readers of ``entries``, columns of the dataset in ``folder`` with shards of the kind ``container``.

    ``others`` are functions from a record's place to a value, by name: columns of records that have no files.
    ``bring`` makes a file be there before it is opened. Of each column ``most`` shards are open at a time.
    Thread-safe except for :meth:`close`; usable after a fork, and after :meth:`close`.
    """

    instead = "open the dataset again by its path"

    def __init__(
        self,
        folder: Path,
        entries: Iterable[ColumnEntry],
        container: str,
        others: Mapping[str, Callable[[RecordPlace], Any]] = NO_COLUMNS,
        bring: Bring = is_there,
        *,
        most: int | None = None,
    ) -> None:
        self._readers = {
            entry.field.name: ColumnReader(folder, entry, container, bring, most=most) for entry in entries
        }
        self._values = {name: reader.value for name, reader in self._readers.items()} | dict(others)
        self.names = tuple(self._values)
        """The names of what a record has, those of ``others`` last."""

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, name: str) -> ColumnReader:
        return self._readers[name]

    def of(self, record: Record, place: RecordPlace) -> ColumnRecord:
        """Return the record at ``place`` with its columns, each of which is read when it is asked for."""
        return ColumnRecord.of(record, ColumnValues(self.names, lambda name: self._values[name](place)))

    def close(self) -> None:
        """Close the files; the next read opens them again. No other thread may be reading."""
        for reader in self._readers.values():
            reader.close()


@dataclass(frozen=True)
class PartFiles:
    """The files of one dataset among several with records and shards that are numbered over all.

    Picklable. ``columns`` are those that are read; records have those of ``boxes`` by the names
    ``box_columns``.
    """

    folder: Path
    container: str
    shards: tuple[FileEntry, ...]
    columns: tuple[ColumnEntry, ...] = ()
    boxes: BoxTable | None = None
    box_columns: tuple[str, ...] = ()

    @property
    def records(self) -> int:
        """The number of its records."""
        return sum(shard.records for shard in self.shards)


class ChainedColumns(Owned):
    """The open columns of several datasets, with records and shards that are numbered over all.

    All have columns of the same names. ``bring`` makes a file be there before it is opened. Those of
    MOST_PARTS datasets are open at a time. Thread-safe except for :meth:`close`; usable after :meth:`close`.
    """

    instead = "open the dataset again by its path"

    def __init__(self, parts: Sequence[PartFiles], bring: Bring = is_there) -> None:
        self._parts = parts
        self._bring = bring
        self._first_records = [0, *accumulate(part.records for part in parts)]
        self._first_shards = [0, *accumulate(len(part.shards) for part in parts)]
        self._boxes = [OpenBoxes(part.boxes) if part.boxes and part.box_columns else None for part in parts]
        self._most = max(1, MAX_OPEN // min(len(parts), MOST_PARTS)) if len(parts) > 1 else None
        self._open: OrderedDict[int, OpenColumns] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Number of columns of a record."""
        return len(self._parts[0].columns) + len(self._parts[0].box_columns)

    def of(self, record: Record, place: RecordPlace) -> ColumnRecord:
        """Return the record at ``place`` among those of all datasets, with its columns."""
        part, inside = self.place_inside(place)
        return self.part(part).of(record, inside)

    def place_inside(self, place: RecordPlace) -> tuple[int, RecordPlace]:
        """Return the number of the dataset that has the record, and its place there."""
        part = bisect_right(self._first_records, place.number) - 1
        number, shard = place.number - self._first_records[part], place.shard - self._first_shards[part]
        return part, place._replace(number=number, shard=shard)

    def part(self, number: int) -> OpenColumns:
        """Return the open columns of one of the datasets."""
        with self._lock:
            if number not in self._open:
                self._open[number] = self._opened(number)
                if len(self._open) > MOST_PARTS:
                    self._open.popitem(last=False)  # closed when no thread reads from it
            self._open.move_to_end(number)
            return self._open[number]

    def _opened(self, number: int) -> OpenColumns:
        part, boxes = self._parts[number], self._boxes[number]
        others = boxes.columns(part.box_columns) if boxes else {}
        return OpenColumns(part.folder, part.columns, part.container, others, self._bring, most=self._most)

    def close(self) -> None:
        """Close the files; the next read opens them again. No other thread may be reading."""
        for columns in self._open.values():
            columns.close()
