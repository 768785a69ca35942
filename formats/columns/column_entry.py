"""A column as the manifest lists it: its field, its files and the hash of its values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from blake3 import blake3

from shardprep.formats.containers.container import SUFFIXES
from shardprep.formats.containers.published_file import FileEntry
from shardprep.formats.records.canonical_json import canonical_json

from .schema import Field, Schema

ROOT_DOMAIN = b"shardprep-columns-1\0"


@dataclass(frozen=True)
class ColumnEntry:
    """A column's ``field``, ``table`` of a row for each record, ``shards`` and ``content_root``.

    Values of one size are in the table; others are in the shards, which hold the records of the dataset's
    shards, in the same order. ``content_root`` is that of a dataset of records with the same keys, no
    labels and the values' bytes as images.
    """

    field: Field
    table: FileEntry
    shards: tuple[FileEntry, ...]
    content_root: str

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """All files of the column."""
        return (self.table, *self.shards)

    def to_json(self) -> dict[str, Any]:
        """Return the column as the manifest holds it."""
        return self.field.to_json() | {
            "table": self.table.to_json(),
            "shards": [shard.to_json() for shard in self.shards],
            "content_root": self.content_root,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ColumnEntry:
        """Return the column of a valid manifest; the inverse of :meth:`to_json`."""
        shards = tuple(FileEntry(**shard) for shard in value["shards"])
        return cls(Field.from_json(value), FileEntry(**value["table"]), shards, value["content_root"])


@dataclass(frozen=True)
class DatasetColumns:
    """The columns of a dataset, in order.

    ``has_images`` is False where records have no image, and zero bytes in its place. ``records_root`` is the
    content root of keys, labels and images alone.
    """

    entries: tuple[ColumnEntry, ...]
    records_root: str
    has_images: bool = True

    @property
    def schema(self) -> Schema:
        return Schema(entry.field for entry in self.entries)

    @property
    def files(self) -> Iterator[FileEntry]:
        """The files of all columns."""
        return (file for entry in self.entries for file in entry.files)

    def __getitem__(self, name: str) -> ColumnEntry:
        return self.entries[self.schema.names.index(self.schema[name].name)]

    @property
    def content_root(self) -> str:
        """The hash over the records and all columns: ``blake3:<hex>``.

        It is the BLAKE3 of ROOT_DOMAIN and the canonical JSON of a list: the root of the records, whether
        they have images, and for each column its field with its content root.
        """
        fields = [entry.field.to_json() | {"content_root": entry.content_root} for entry in self.entries]
        parts = [self.records_root, self.has_images, fields]
        return f"blake3:{blake3(ROOT_DOMAIN).update(canonical_json(parts)).hexdigest()}"

    def to_json(self) -> dict[str, Any]:
        """Return the columns as the manifest holds them."""
        return {
            "fields": [entry.to_json() for entry in self.entries],
            "records_root": self.records_root,
            "has_images": self.has_images,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> DatasetColumns:
        """Return the columns of a valid manifest; the inverse of :meth:`to_json`."""
        entries = tuple(ColumnEntry.from_json(each) for each in value["fields"])
        return cls(entries, value["records_root"], value["has_images"])


def table_name(column: str) -> str:
    """Return the name of a column's table."""
    return f"column-{column}.npy"


def shard_name(column: str, number: int, container: str) -> str:
    """Return the name of a column's shard."""
    return f"column-{column}-{number:05d}{SUFFIXES[container]}"


def column_row(field: Field) -> np.dtype[np.void]:
    """Return the dtype of a row of the column's table.

    It has ``value``, or the ``length`` in bytes of a value in the shards, and ``crc32c``, the checksum of a
    record of the key, no label and the value's bytes.
    """
    first = ("length", "<u4") if field.codec.dtype is None else ("value", field.codec.dtype)
    return np.dtype([first, ("crc32c", "<u4")])


def rows_of(field: Field, values: Sequence[bytes], crcs: Sequence[int]) -> np.ndarray[Any, np.dtype[np.void]]:
    """Return the rows of a column's table for these encoded values and their checksums."""
    rows = np.zeros(len(values), column_row(field))
    rows["crc32c"] = crcs
    if field.codec.dtype is None:
        rows["length"] = [len(value) for value in values]
    elif rows.dtype.itemsize > 4:  # a value may have no bytes
        size = rows.dtype.itemsize - 4
        body = np.frombuffer(b"".join(values), np.uint8).reshape(len(values), size)
        rows.view(np.uint8).reshape(len(values), -1)[:, :size] = body
    return rows
