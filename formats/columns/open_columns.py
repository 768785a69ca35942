"""The open columns of a dataset, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from shardprep.formats.containers.shard_cache import Bring, is_there
from shardprep.formats.records.record import NO_COLUMNS, Record
from shardprep.formats.system.owned import Owned

from .column_entry import ColumnEntry
from .column_reader import ColumnReader, RecordPlace
from .column_record import ColumnRecord, ColumnValues


class OpenColumns(Owned):
    """Readers of ``entries``, columns of the dataset in ``folder`` with shards of the kind ``container``.

    ``others`` are functions from a record's place to a value, by name: columns of records that have no files.
    ``bring`` makes a file be there before it is opened. Thread-safe except for :meth:`close`; usable after a
    fork, and after :meth:`close`.
    """

    instead = "open the dataset again by its path"

    def __init__(
        self,
        folder: Path,
        entries: Iterable[ColumnEntry],
        container: str,
        others: Mapping[str, Callable[[RecordPlace], Any]] = NO_COLUMNS,
        bring: Bring = is_there,
    ) -> None:
        self._readers = {entry.field.name: ColumnReader(folder, entry, container, bring) for entry in entries}
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
