"""The columns of an open dataset: their files in the manifest, and each value checked when it is read.

Boxes of annotations have a table of their own, and are read as columns.
"""

from __future__ import annotations

import re
import struct
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from shardprep.formats.errors import CorruptRecord, ManifestDamaged
from shardprep.formats.records.codecs import BadValue
from shardprep.formats.records.items import ColumnRecord, ColumnValues
from shardprep.formats.records.labels import UNLABELLED
from shardprep.formats.records.record import NO_COLUMNS, Record, record_crc
from shardprep.formats.records.schema import Field, Schema
from shardprep.formats.runtime.files import flush_file
from shardprep.formats.runtime.json_record import canonical_json
from shardprep.formats.runtime.owned import Owned
from shardprep.formats.shards.container import SUFFIXES
from shardprep.formats.shards.files import FileEntry, Rows, ShardFile, read_table, table_header
from shardprep.formats.shards.read import DAMAGE, LOCAL, MAX_OPEN, LocalFiles, OpenShards, PartShards

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

    @property
    def row(self) -> np.dtype[np.void]:
        """The dtype of a row of its table: that of format 1.0 if the table has its size."""
        earlier, records = column_row(self.field, offsets=False), self.table.records
        is_earlier = self.table.size == len(table_header(earlier, records)) + records * earlier.itemsize
        return earlier if is_earlier else column_row(self.field)

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


def column_row(field: Field, *, offsets: bool = True) -> np.dtype[np.void]:
    """Return the dtype of a row of the column's table.

    It has ``value``, or the ``offset`` of a value in its shard's file and its ``length`` in bytes, and
    ``crc32c``, the checksum of a record of the key, no label and the value's bytes. Format 1.0 has no
    ``offsets``.
    """
    if field.codec.dtype is not None:
        return np.dtype([("value", field.codec.dtype), ("crc32c", "<u4")])
    return np.dtype([*([("offset", "<u8")] if offsets else []), ("length", "<u4"), ("crc32c", "<u4")])


def rows_of(field: Field, values: Sequence[bytes], crcs: Sequence[int]) -> np.ndarray[Any, np.dtype[np.void]]:
    """Return the rows of a column's table for these encoded values and their checksums, without offsets."""
    rows = np.zeros(len(values), column_row(field))
    rows["crc32c"] = crcs
    if field.codec.dtype is None:
        rows["length"] = [len(value) for value in values]
    elif rows.dtype.itemsize > 4:  # a value may have no bytes
        size = rows.dtype.itemsize - 4
        body = np.frombuffer(b"".join(values), np.uint8).reshape(len(values), size)
        rows.view(np.uint8).reshape(len(values), rows.dtype.itemsize)[:, :size] = body
    return rows


ROWS_BYTES = 4096  # of a table that are read at once
_PLACE = struct.Struct("<QII")  # offset, length, CRC-32C


class RecordPlace(NamedTuple):
    """A record's place: its number in the dataset, its shard and ordinal there, and its key."""

    number: int
    shard: int
    ordinal: int
    key: bytes


class ColumnReader(Owned):
    """Reader of one column of the dataset in ``folder``, with shards of the kind ``container``.

    Files are opened when first read, ``most`` shards at a time, after ``files`` made them be there, and read
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
        files: LocalFiles = LOCAL,
        *,
        most: int | None = None,
    ) -> None:
        self.entry = entry
        self._folder = folder
        self._codec = entry.field.codec
        self._row = entry.row
        self._has_offsets = "offset" in (self._row.names or ())
        self._start = len(table_header(self._row, entry.table.records))
        self._rows_at_once = max(1, ROWS_BYTES // self._row.itemsize)
        self._block = -1, b""
        self._table: ShardFile | None = None
        self._shards = OpenShards([PartShards(folder, container, entry.shards)], files, most=most)
        self._files = files

    def value(self, place: RecordPlace) -> Any:
        """Return a record's value."""
        try:
            return self._codec.decode(self.data(place))
        except BadValue as error:
            raise self._corrupt(place, error.message) from error

    def data(self, place: RecordPlace) -> bytes:
        """Return a record's value, encoded."""
        try:
            return self._data(place)
        except (*DAMAGE, ManifestDamaged) as error:
            with self._files.right(self.entry.table, error):
                self._table, self._block = None, (-1, b"")
                return self._data(place)

    def _data(self, place: RecordPlace) -> bytes:
        row = self._read_row(place)
        if self._codec.dtype is None:
            offset, length, crc32c = _PLACE.unpack(row if self._has_offsets else bytes(8) + row)
            address = place.key, UNLABELLED, crc32c, offset, length
            return self._shards.image(place.shard, place.ordinal, address)
        value, crc32c = row[:-4], int.from_bytes(row[-4:], "little")
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
            self._files.bring(self.entry.table)
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


class OpenBoxes:
    """The boxes of each record: ``boxes`` float32 [n, 4] and ``box_labels`` int32 [n], as BOX_COLUMNS.

    The table is read and checked when a record's boxes are first asked for, and then kept: 24 bytes a box.
    Arrays are read-only. Thread-safe. Raises ManifestDamaged, OSError.
    """

    def __init__(self, table: BoxTable) -> None:
        self._table = table

    def value(self, name: str, place: RecordPlace) -> npt.NDArray[Any]:
        """Return a record's value of one of BOX_COLUMNS."""
        records = self._columns["record"]
        first, last = np.searchsorted(records, np.array([place.number, place.number + 1], np.uint32))
        return self._columns[name][first:last]

    @cached_property
    def _columns(self) -> dict[str, npt.NDArray[Any]]:
        """The columns of the table, each contiguous: they are searched and cut for each record."""
        rows = self._table.rows()
        boxes = np.stack([rows[side] for side in SIDES], axis=1)
        labels = np.array(self._table.label_map, np.int32)[rows["label"]]
        for array in (boxes, labels):
            array.flags.writeable = False
        return {"record": np.ascontiguousarray(rows["record"]), "boxes": boxes, "box_labels": labels}


MOST_PARTS = 32  # whose columns are open at a time


class OpenColumns(Owned):
    """Readers of ``entries``, columns of the dataset in ``folder`` with shards of the kind ``container``.

    ``others`` are functions from a record's place to a value, by name: columns of records that have no files.
    ``files`` makes a file be there before it is opened. Of each column ``most`` shards are open at a time.
    Thread-safe except for :meth:`close`; usable after a fork, and after :meth:`close`.
    """

    instead = "open the dataset again by its path"

    def __init__(
        self,
        folder: Path,
        entries: Iterable[ColumnEntry],
        container: str,
        others: Mapping[str, Callable[[RecordPlace], Any]] = NO_COLUMNS,
        files: LocalFiles = LOCAL,
        *,
        most: int | None = None,
    ) -> None:
        self._readers = {
            entry.field.name: ColumnReader(folder, entry, container, files, most=most) for entry in entries
        }
        self._values = {name: reader.value for name, reader in self._readers.items()} | dict(others)
        self.names = tuple(self._values)
        """The names of a record's values, those of ``others`` last."""

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, name: str) -> ColumnReader:
        return self._readers[name]

    def of(self, record: Record, place: RecordPlace) -> ColumnRecord:
        """Return the record at ``place``, with columns that are read when they are asked for."""
        return ColumnRecord.of(record, ColumnValues(self.names, lambda name: self._values[name](place)))

    def close(self) -> None:
        """Close the files; the next read opens them again. No other thread may be reading."""
        for reader in self._readers.values():
            reader.close()


@dataclass(frozen=True)
class PartFiles(PartShards):
    """The files of one dataset among several with records and shards that are numbered over all.

    Picklable. ``columns`` are those that are read; records have those of ``boxes`` by the names
    ``box_columns``.
    """

    columns: tuple[ColumnEntry, ...] = ()
    boxes: BoxTable | None = None
    box_columns: tuple[str, ...] = ()

    @property
    def records(self) -> int:
        """The number of its records."""
        return sum(shard.records for shard in self.shards)


class ChainedColumns(Owned):
    """The open columns of several datasets, with records and shards that are numbered over all.

    All have columns of the same names. ``files`` makes a file be there before it is opened. Those of
    MOST_PARTS datasets are open at a time. Thread-safe except for :meth:`close`; usable after :meth:`close`.
    """

    instead = "open the dataset again by its path"

    def __init__(self, parts: Sequence[PartFiles], files: LocalFiles = LOCAL) -> None:
        self._parts = parts
        self._files = files
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
        others = {name: partial(boxes.value, name) for name in part.box_columns} if boxes else {}
        return OpenColumns(part.folder, part.columns, part.container, others, self._files, most=self._most)

    def close(self) -> None:
        """Close the files; the next read opens them again. No other thread may be reading."""
        for columns in self._open.values():
            columns.close()


COLUMN_FILE = re.compile(r"column-[A-Za-z0-9_.-]+(\.npy|-\d{5,}\.(lmdb|h5))")


def unlisted_columns(dataset: Path, listed: Collection[str]) -> list[Path]:
    """Return the files of columns in the folder that are not among the names ``listed``, in order."""
    return sorted(
        path for path in dataset.iterdir() if COLUMN_FILE.fullmatch(path.name) and path.name not in listed
    )


def remove_unlisted_columns(dataset: Path, listed: Collection[str]) -> None:
    """Remove these files. The caller holds the lock of the folder's work."""
    for path in unlisted_columns(dataset, listed):
        path.unlink()
    flush_file(dataset)
