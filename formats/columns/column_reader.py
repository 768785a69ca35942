"""An open column: each record's value, checked when it is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardprep.formats.containers.shard_cache import Bring, OpenShards, is_there
from shardprep.formats.containers.shard_file import ShardFile
from shardprep.formats.containers.table import Rows, table_header
from shardprep.formats.errors import CorruptRecord, ManifestDamaged
from shardprep.formats.records.labels import UNLABELLED
from shardprep.formats.records.record import record_crc
from shardprep.formats.system.owned import Owned

from .codec import BadValue
from .column_entry import ColumnEntry, column_row

ROWS_BYTES = 4096  # of a table that are read at once


class RecordPlace(NamedTuple):
    """A record's place: its number in the dataset, its shard and ordinal there, and its key."""

    number: int
    shard: int
    ordinal: int
    key: bytes


class ColumnReader(Owned):
    """Reader of one column of the dataset in ``folder``, with shards of the kind ``container``.

    Files are opened when first read, ``most`` shards at a time, after ``bring`` made them be there, and read
    by position. Every value is checked against its checksum in the table, which covers the record's key.
    Thread-safe except for :meth:`close`; usable after a fork. Raises CorruptRecord and ShardDamaged for
    damage, ManifestDamaged for a damaged table, and OSError.
    """

    instead = "open the dataset again by its path"

    def __init__(
        self,
        folder: Path,
        entry: ColumnEntry,
        container: str,
        bring: Bring = is_there,
        *,
        most: int | None = None,
    ) -> None:
        self.entry = entry
        self._folder = folder
        self._codec = entry.field.codec
        self._row = column_row(entry.field)
        self._start = len(table_header(self._row, entry.table.records))
        self._rows_at_once = max(1, ROWS_BYTES // self._row.itemsize)
        self._block = -1, b""
        self._table: ShardFile | None = None
        self._shards = OpenShards(folder, container, entry.shards, bring, most=most)
        self._bring = bring

    def value(self, place: RecordPlace) -> Any:
        """Return a record's value."""
        try:
            return self._codec.decode(self.data(place))
        except BadValue as error:
            raise self._corrupt(place, error.message) from error

    def data(self, place: RecordPlace) -> bytes:
        """Return a record's value, encoded."""
        row = self._read_row(place)
        crc32c = int.from_bytes(row[-4:], "little")
        if self._codec.dtype is None:
            reader = self._shards[place.shard]
            return reader.checked(place.ordinal, indexed=(place.key, UNLABELLED, crc32c)).image
        value = row[:-4]
        if record_crc(place.key, UNLABELLED, value) != crc32c:
            raise self._corrupt(place, "does not match its CRC-32C; prep repair rebuilds it")
        return value

    def lengths(self) -> np.ndarray[Any, np.dtype[np.uint32]]:
        """Return the length of each value in bytes, uint32."""
        if self._codec.size is not None:
            return np.full(self.entry.table.records, self._codec.size, np.uint32)
        return self.table()["length"].copy()

    def table(self) -> Rows:
        """Return all rows of the table, unchecked, read-only: of numbers, they are the values."""
        size = self.entry.table.records * self._row.itemsize
        data = self._opened().read_at(size, self._start)
        if len(data) != size:
            raise ManifestDamaged("ends too early; prep repair rebuilds it", path=self._path)
        return np.frombuffer(data, self._row)

    def _read_row(self, place: RecordPlace) -> bytes:
        """Return the bytes of a record's row; the rows around it are kept for the next records."""
        size = self._row.itemsize
        first = place.number - place.number % self._rows_at_once
        if (block := self._block)[0] != first:
            length = self._rows_at_once * size
            self._block = block = first, self._opened().read_at(length, self._start + first * size)
        start = (place.number - first) * size
        row = block[1][start : start + size]
        if len(row) != size:
            raise ManifestDamaged("ends too early; prep repair rebuilds it", path=self._path)
        return row

    def _opened(self) -> ShardFile:
        table = self._table
        if table is None:
            self._bring(self.entry.table)
            table = ShardFile(self._path)
            if table.size != self.entry.table.size:
                table.close()
                message = f"has {table.size} bytes, not {self.entry.table.size}; prep repair rebuilds it"
                raise ManifestDamaged(message, path=self._path)
            self._table = table
        return table

    @property
    def _path(self) -> Path:
        return self._folder / self.entry.table.name

    def _corrupt(self, place: RecordPlace, message: str) -> CorruptRecord:
        name = self.entry.field.name
        key = place.key.decode("utf-8", "replace")
        return CorruptRecord(f"the column {name} {message}", path=self._folder, key=key)

    def close(self) -> None:
        """Close the files; the next read opens them again. No other thread may be reading."""
        table, self._table, self._block = self._table, None, (-1, b"")
        if table is not None:
            table.close()
        self._shards.close()
