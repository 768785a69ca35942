"""The check of every value of one file of a column: a shard, or the table of values of one size."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardprep.formats.columns.codec import BadValue
from shardprep.formats.columns.column_entry import column_row
from shardprep.formats.columns.schema import Field
from shardprep.formats.containers.container import ShardReader
from shardprep.formats.containers.registry import container
from shardprep.formats.containers.shard_file import ShardFile
from shardprep.formats.containers.table import Rows, table_header
from shardprep.formats.errors import CorruptRecord, ShardDamaged
from shardprep.formats.records.labels import UNLABELLED
from shardprep.formats.records.record import content_digest, record_crc

from .check import Check, Checked, hashed_file
from .decoding import check_decoding

ROWS_BYTES = 1 << 20  # of a table, read at a time

Value = tuple[bytes, bytes]
"""A record's key, and its value in the column, encoded."""


@dataclass(frozen=True, eq=False)
class ColumnCheck(Check):
    """What to check of a file of the column ``field``; ``keys`` are its records', None if unknown."""

    field: Field
    keys: npt.NDArray[np.bytes_] | None

    @abstractmethod
    def _values(self, path: Path, found: Checked, ordinals: range) -> Iterator[Value]:
        """Yield the intact values at these ordinals; what is wrong with the others is added to ``found``."""

    def found(self) -> Checked:
        found, digests = Checked(), []
        with hashed_file(self, found) as path:
            for key, value in self._values(path, found, range(self.records)):
                digests.append(content_digest(key, UNLABELLED, value))
                if self.decode:
                    self._decode(key, value, found)
        found.digests = b"".join(digests)
        return found

    def decoded(self, ordinals: range) -> Checked:
        found = Checked()
        with suppress(ShardDamaged):
            for key, value in self._values(self.path, Checked(), ordinals):
                self._decode(key, value, found)
        return found

    def _decode(self, key: bytes, value: bytes, found: Checked) -> None:
        if self.field.kind == "image":
            check_decoding(key, value, found)
            return
        try:
            self.field.codec.decode(value)
        except BadValue as error:
            found.problems.append((key.decode("utf-8", "replace"), error.message))


@dataclass(frozen=True, eq=False)
class ColumnShardCheck(ColumnCheck):
    """What to check of a column's shard; ``rows`` are its rows of the table, None if that is damaged."""

    container: str
    rows: Rows | None

    def key_of(self, ordinal: int) -> str:
        with container(self.container).read(self.path) as reader:
            return reader.stored(ordinal).key.decode("utf-8", "replace")

    def _values(self, path: Path, found: Checked, ordinals: range) -> Iterator[Value]:
        with container(self.container).read(path) as reader:
            if len(reader) != self.records:
                found.problems.append((None, f"has {len(reader)} records, not {self.records}"))
            known = (
                ordinals if self.keys is not None else range(ordinals.start, min(ordinals.stop, len(reader)))
            )
            for ordinal in known:
                value = self._value(reader, ordinal, found)
                if value is not None:
                    yield value

    def _value(self, reader: ShardReader, ordinal: int, found: Checked) -> Value | None:
        wanted = None if self.keys is None else self.keys[ordinal]
        named = None if wanted is None else wanted.decode("utf-8", "replace")
        try:
            stored = reader.checked(ordinal)
        except (CorruptRecord, ShardDamaged) as error:
            found.problems.append((named or error.key, error.message))
            return None
        row = None if self.rows is None else self.rows[ordinal].item()
        if (
            wanted not in (None, stored.key)
            or stored.label != UNLABELLED
            or row not in (None, (len(stored.image), stored.crc32c))
        ):
            there = stored.key.decode("utf-8", "replace")
            found.problems.append((named, f"value {ordinal} differs from the table: its key is {there}"))
            return None
        return stored.key, stored.image


@dataclass(frozen=True, eq=False)
class ColumnTableCheck(ColumnCheck):
    """What to check of a column's table of values of one size; without keys no checksum can be."""

    def key_of(self, ordinal: int) -> str:
        return "" if self.keys is None else self.keys[ordinal].decode("utf-8", "replace")

    def _values(self, path: Path, found: Checked, ordinals: range) -> Iterator[Value]:
        if self.keys is None:
            return
        rows = self._rows(path, ordinals)
        for ordinal, row in zip(ordinals, rows, strict=False):
            key, value = self.keys[ordinal], row[:-4]
            if record_crc(key, UNLABELLED, value) == int.from_bytes(row[-4:], "little"):
                yield key, value
            else:
                found.problems.append((self.key_of(ordinal), f"row {ordinal} does not match its CRC-32C"))

    def _rows(self, path: Path, ordinals: range) -> Iterator[bytes]:
        """Yield the bytes of each row. Raises ShardDamaged if the file ends before the last."""
        row = column_row(self.field)
        start, size = len(table_header(row, self.records)), row.itemsize
        file, left = ShardFile(path), iter(ordinals)
        try:
            while some := list(islice(left, max(1, ROWS_BYTES // size))):
                data = file.read_at(len(some) * size, start + some[0] * size)
                if len(data) < len(some) * size:
                    raise ShardDamaged("ends before its last row", path=self.path)
                yield from (data[at : at + size] for at in range(0, len(data), size))
        finally:
            file.close()
