"""Columns of a dataset: their files, and checked reads of their values.

Bounding boxes have a table of their own, and are read as columns.
"""

from __future__ import annotations

import resource
import struct
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from shardprep.formats.errors import CorruptRecord, ManifestDamaged, OperationError
from shardprep.formats.records.record import (
    NO_COLUMNS,
    UNLABELLED,
    ColumnRecord,
    ColumnValues,
    Record,
    end_in_crc,
    record_crc,
)
from shardprep.formats.records.schema import BadValue, Field, Schema
from shardprep.formats.runtime.files import flush_file
from shardprep.formats.runtime.json_record import canonical_json, parse_fields, to_json_value
from shardprep.formats.runtime.owners import Owner, cached_property
from shardprep.formats.shards.read import (
    DAMAGE,
    LOCAL,
    MANIFEST_NAME,
    OUTPUT_FILES,
    SUFFIXES,
    Address,
    Addresses,
    FileEntry,
    LocalFiles,
    Rows,
    Shard,
    ShardFile,
    read_table,
    table_header,
)

ROOT_DOMAIN = b"shardprep-columns-1\0"


@dataclass(frozen=True)
class ColumnEntry:
    """A column's ``field``, ``table`` (one row per record), ``shards`` and ``content_root``.

    Fixed-size values are in the table; others are in shards with the same records, in the same order, as the
    dataset's. ``content_root`` is that of a dataset with the same keys, no labels, and the values as images.
    """

    field: Field
    table: FileEntry
    shards: tuple[FileEntry, ...]
    content_root: str

    @property
    def files(self) -> tuple[FileEntry, ...]:
        return (self.table, *self.shards)

    @property
    def row(self) -> np.dtype[np.void]:
        """The dtype of the table's rows: that of format 1.0 if the table's size matches it."""
        earlier, records = column_row(self.field, offsets=False), self.table.records
        is_earlier = self.table.size == len(table_header(earlier, records)) + records * earlier.itemsize
        return earlier if is_earlier else column_row(self.field)

    def to_json(self) -> dict[str, Any]:
        files = {"table": to_json_value(self.table), "shards": to_json_value(self.shards)}
        return self.field.to_json() | files | {"content_root": self.content_root}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ColumnEntry:
        """Return the column of a valid manifest."""
        return cls(**parse_fields(cls, {"field": value, **value}))


@dataclass(frozen=True)
class DatasetColumns:
    """The columns of a dataset, in order.

    ``records_root`` is the content root of keys, labels and images alone. Without ``has_images``, every image
    is empty.
    """

    fields: tuple[ColumnEntry, ...]
    records_root: str
    has_images: bool = True

    @property
    def schema(self) -> Schema:
        return Schema(entry.field for entry in self.fields)

    def __getitem__(self, name: str) -> ColumnEntry:
        return self.fields[self.schema.names.index(self.schema[name].name)]

    @property
    def content_root(self) -> str:
        """The hash over the records and all columns: ``blake3:<hex>``.

        It is the BLAKE3 of ROOT_DOMAIN and the canonical JSON of [records_root, has_images, fields], where
        each field has its column's content root.
        """
        fields = [entry.field.to_json() | {"content_root": entry.content_root} for entry in self.fields]
        parts = [self.records_root, self.has_images, fields]
        return f"blake3:{blake3(ROOT_DOMAIN).update(canonical_json(parts)).hexdigest()}"


def table_name(column: str) -> str:
    return f"column-{column}.npy"


def shard_name(column: str, number: int, container: str) -> str:
    return f"column-{column}-{number:05d}{SUFFIXES[container]}"


def column_row(field: Field, *, offsets: bool = True) -> np.dtype[np.void]:
    """Return the row dtype of a column's table.

    A row has either ``value``, or the value's ``offset`` in its shard file and ``length`` in bytes; and
    ``crc32c``, the checksum over the record's key, no label and the value. Format 1.0 has no ``offsets``.
    """
    if field.codec.dtype is not None:
        return np.dtype([("value", field.codec.dtype), ("crc32c", "<u4")])
    return np.dtype([*([("offset", "<u8")] if offsets else []), ("length", "<u4"), ("crc32c", "<u4")])


ROWS_BYTES = 4096  # of a table, read at once
_PLACE = struct.Struct("<QII")  # offset, length, CRC-32C


class RecordPlace(NamedTuple):
    """A record's number in the dataset, its shard, its ordinal in that shard, and its key."""

    number: int
    shard: int
    ordinal: int
    key: bytes


class ColumnTable:
    """An open column table of one dataset. Raises ManifestDamaged for another size or header; OSError."""

    def __init__(self, path: Path, entry: ColumnEntry) -> None:
        self.row, self._records = entry.row, entry.table.records
        header = table_header(self.row, self._records)
        self._start = len(header)
        self._rows_at_once = max(1, ROWS_BYTES // self.row.itemsize)
        self._block = -1, b""
        self._file = ShardFile(path)
        if self._file.size != entry.table.size or self._file.read_at(len(header), 0) != header:
            raise ManifestDamaged("is not the table of its column; prep repair rebuilds it", path=path)

    def close(self) -> None:
        self._file.close()

    def row_at(self, number: int) -> bytes:
        """Return the bytes of a row, and cache the rows around it."""
        first = number - number % self._rows_at_once
        if (block := self._block)[0] != first:  # one read of the attribute: threads share it
            count = min(self._rows_at_once, self._records - first)
            self._block = block = first, self._read(first, count)
        start = (number - first) * self.row.itemsize
        return block[1][start : start + self.row.itemsize]

    def rows(self) -> Rows:
        return np.frombuffer(self._read(0, self._records), self.row)

    def _read(self, first: int, count: int) -> bytes:
        size = count * self.row.itemsize
        data = self._file.read_at(size, self._start + first * self.row.itemsize)
        if len(data) != size:
            raise ManifestDamaged("ends too early; prep repair rebuilds it", path=self._file.path)
        return data


SIDES = ("x_min", "y_min", "x_max", "y_max")
BOX_DTYPE = np.dtype([("record", "<u4"), ("label", "<i4"), *((side, "<f4") for side in SIDES)])
BOX_COLUMNS = {"boxes": "float32[*,4]", "box_labels": "int32[*]"}  # with their kinds


@dataclass(frozen=True)
class BoxTable:
    """A dataset's table of boxes, read and checked on first use and then kept: 24 bytes per box.

    ``entry`` is the file in ``folder``; ``records`` is the dataset's number of records. A box of class n has
    the label ``label_map[n]``, a box without a class the last one. A record's values are ``boxes``, float32
    [n, 4], and ``box_labels``, int32 [n], both read-only. Thread-safe. Picklable before it is read. Raises
    ManifestDamaged, OSError.
    """

    folder: Path
    entry: FileEntry
    records: int
    label_map: tuple[int, ...]

    def value(self, name: str, number: int) -> npt.NDArray[Any]:
        """Return a record's value of one of BOX_COLUMNS."""
        first, last = np.searchsorted(self._columns["record"], np.array([number, number + 1], np.uint32))
        return self._columns[name][first:last]

    @cached_property
    def _columns(self) -> dict[str, npt.NDArray[Any]]:
        """The table's columns, each contiguous, since each record searches and slices them."""
        rows = self.rows()
        boxes = np.stack([rows[side] for side in SIDES], axis=1)
        labels = np.array(self.label_map, np.int32)[rows["label"]]
        for array in (boxes, labels):
            array.flags.writeable = False
        return {"record": np.ascontiguousarray(rows["record"]), "boxes": boxes, "box_labels": labels}

    def rows(self) -> Rows:
        """Read all rows, checked to be of existing records, in order, and within the image."""
        path = self.folder / self.entry.name
        rows = read_table(path, self.entry, BOX_DTYPE)
        if len(rows) and not self._fits(rows):
            raise ManifestDamaged("has boxes that do not fit the manifest", path=path)
        return rows

    def _fits(self, rows: Rows) -> bool:
        records, labels = rows["record"].astype(np.int64), rows["label"]
        are_in_order = records[-1] < self.records and (np.diff(records) >= 0).all()
        are_known = labels.min() >= UNLABELLED and labels.max() < len(self.label_map) - 1
        sides = [(rows[low], rows[high]) for low, high in (("x_min", "x_max"), ("y_min", "y_max"))]
        are_fractions = all(((low >= 0) & (low <= high) & (high <= 1)).all() for low, high in sides)
        return bool(are_in_order and are_known and are_fractions)


@dataclass(frozen=True)
class PartFiles:
    """The files to read of one dataset in a set of datasets. Picklable.

    ``columns`` are those to read. Records have the values of ``boxes`` under the names ``box_columns``.
    """

    folder: Path
    records_root: str
    container: str
    shards: tuple[FileEntry, ...]
    columns: tuple[ColumnEntry, ...] = ()
    boxes: BoxTable | None = None
    box_columns: tuple[str, ...] = ()

    @cached_property
    def records(self) -> int:
        return sum(shard.records for shard in self.shards)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of a record's columns, boxes last."""
        return (*(entry.field.name for entry in self.columns), *self.box_columns)

    def refuse_other(self) -> None:
        """Raise ManifestDamaged if another dataset has replaced this one since it was opened; OSError."""
        data = (self.folder / MANIFEST_NAME).read_bytes()
        roots = self.records_root, *(each.content_root for each in self.columns)
        if not all(root.encode() in data for root in roots):
            raise ManifestDamaged("was replaced by another dataset; open it again", path=self.folder)


# A quarter of the process's descriptors: 256 by default, and more in most containers.
MAX_OPEN = min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[0]) // 4
CHECKED = 16  # open shards that are checked for deletion when another is opened: each takes a system call

Result = TypeVar("Result")
File = TypeVar("File", Shard, ColumnTable)


class OpenRecords(Owner):
    """Reads records and column values by numbers that count over all ``parts``, which have equal columns.

    Files are made available by ``files`` and opened on first use. At most MAX_OPEN shards (including those of
    columns) and MAX_OPEN column tables stay open; the first opened is released first. Opening a shard also
    releases those that a cache has deleted, among CHECKED open ones. A released file is closed once no thread
    reads from it.

    Every value is checked against its checksum in the table, which covers the record's key. A failed read is
    repeated once if ``files`` can replace the file; then it raises the errors of :class:`.Shard`, or
    ManifestDamaged for a damaged table. Thread-safe except for :meth:`close`; usable after a fork, and after
    :meth:`close`.
    """

    def __init__(self, parts: Sequence[PartFiles], files: LocalFiles = LOCAL) -> None:
        self._parts = parts
        self.names = parts[0].names
        self._has_columns = any(part.names for part in parts)
        self._files = files
        self._first_records = [0, *accumulate(part.records for part in parts)]
        self._first_shards = [0, *accumulate(len(part.shards) for part in parts)]
        self._columns = {entry.field.name: at for at, entry in enumerate(parts[0].columns)}
        self._codecs = [entry.field.codec for entry in parts[0].columns]
        # Both are changed by single calls, without a lock, because opening can download. Column shards are
        # numbered after all record shards.
        self._shards: dict[int, Shard] = {}
        self._addresses: dict[Path, Addresses] = {}  # of format 1.0, whose shards take long to open
        self._tables: dict[tuple[int, int], ColumnTable] = {}

    def __getitem__(self, number: int) -> Shard:
        return self._shards.get(number) or self._open(number)

    def shard(self, number: int) -> Shard:
        """Return an opened record shard. Raises IndexError."""
        count = self._first_shards[-1]
        if not 0 <= number < count:
            raise IndexError(f"shard {number} of {count}")
        return self[number]

    def read_image(self, number: int, ordinal: int, address: Address) -> bytes:
        """Return a record's image, as :meth:`.Shard.read_image` does."""
        try:
            return self[number].read_image(ordinal, address)
        except DAMAGE as error:
            return self.retry(number, error, lambda shard: shard.read_image(ordinal, address))

    def retry(self, number: int, error: Exception, read: Callable[[Shard], Result]) -> Result:
        """Retry a failed read: from the current file if a deleted one was open, else from a replaced file."""
        if self._files is LOCAL:
            with suppress(OSError):
                self._find_shard(number)[0].refuse_other()
            raise error
        shard = self._shards.pop(number, None)
        self._addresses.clear()
        if shard is not None and shard.file.is_deleted:
            try:
                return read(self[number])
            except DAMAGE as again:
                error = again
        with self._files.replace(self._find_shard(number)[1], error):
            return read(self._open_shard(number))

    def _open(self, number: int) -> Shard:
        _, entry = self._find_shard(number)
        apart = 1 + len(self._shards) // CHECKED
        for opened, shard in () if self._files is LOCAL else list(self._shards.items()):
            if (opened - number) % apart == 0 and shard.file.is_deleted:
                self._shards.pop(opened, None)
        self._files.provide(entry)
        try:
            return self._open_shard(number)
        except DAMAGE as error:
            return self.retry(number, error, lambda shard: shard)

    def _open_shard(self, number: int) -> Shard:
        part, entry = self._find_shard(number)
        try:
            shard = Shard(part.folder / entry.name, part.container, entry, self._addresses)
        except FileNotFoundError as error:
            if self._files is LOCAL:
                raise
            raise OperationError("was deleted while it was in use; start again", path=part.folder) from error
        return _keep_open(self._shards, number, shard)

    def _find_shard(self, number: int) -> tuple[PartFiles, FileEntry]:
        column, place = divmod(number, self._first_shards[-1])
        at = bisect_right(self._first_shards, place) - 1
        part = self._parts[at]
        shards = part.columns[column - 1].shards if column else part.shards
        return part, shards[place - self._first_shards[at]]

    def record(self, place: RecordPlace, label: int, image: bytes, *, is_crop_ready: bool = False) -> Record:
        """Return the record at ``place`` with this label and image, and its columns, read on access."""
        fields = place.key.decode(), label, image
        if not self._has_columns:
            return ColumnRecord.of(fields, NO_COLUMNS, True) if is_crop_ready else Record(*fields)
        part = self._part_of(place.number)
        values = ColumnValues(self._parts[part].names, partial(self._read_column, part, place))
        return ColumnRecord.of(fields, values, is_crop_ready)

    def _read_column(self, part: int, place: RecordPlace, name: str) -> Any:
        boxes = self._parts[part].boxes
        if boxes is None or name in self._columns:
            return self.value(name, place)
        return boxes.value(name, place.number - self._first_records[part])

    def value(self, name: str, place: RecordPlace) -> Any:
        try:
            return self._codecs[self._columns[name]].decode(self.data(name, place))
        except BadValue as error:
            raise self._corrupt_error(name, place, error.message) from error

    def data(self, name: str, place: RecordPlace) -> bytes:
        """Return a record's encoded value of a column."""
        part, column = self._part_of(place.number), self._columns[name]
        try:
            return self._data(part, column, place)
        except (*DAMAGE, ManifestDamaged) as error:
            with self._files.replace(self._parts[part].columns[column].table, error):
                self._tables.pop((part, column), None)
                return self._data(part, column, place)

    def _data(self, part: int, column: int, place: RecordPlace) -> bytes:
        row = self._table(part, column).row_at(place.number - self._first_records[part])
        if self._codecs[column].dtype is None:
            offset, length, crc32c = _PLACE.unpack(row.rjust(_PLACE.size, b"\0"))  # format 1.0 has no offset
            address = place.key, UNLABELLED, crc32c, offset, length
            number = place.shard + self._first_shards[-1] * (1 + column)
            return self.read_image(number, place.ordinal, address)
        value, crc32c = row[:-4], int.from_bytes(row[-4:], "little")
        if record_crc(place.key, UNLABELLED, value) != crc32c:
            name = self._parts[0].columns[column].field.name
            raise self._corrupt_error(name, place, "does not match its CRC-32C; prep repair rebuilds it")
        return value

    def fill(self, columns: Mapping[str, Any], numbers: Sequence[int], keys: Sequence[bytes]) -> bool:
        """Write the records' values of fixed-size columns to arrays, faster than one by one.

        Return False, with anything in the arrays, unless all are intact; :meth:`value` says which is not.
        """
        places = [(part := self._part_of(number), number - self._first_records[part]) for number in numbers]
        heads = [record_crc(key, UNLABELLED, b"") for key in keys]
        try:
            for name, values in columns.items():
                column = self._columns[name]
                rows = [self._table(part, column).row_at(number) for part, number in places]
                column_values = np.frombuffer(b"".join(rows), self._parts[0].columns[column].row)["value"]
                if not (end_in_crc(heads, rows) and self._codecs[column].are_valid(column_values)):
                    return False
                values[...] = column_values
        except (*DAMAGE, ManifestDamaged):
            return False
        return True

    def lengths(self, name: str) -> npt.NDArray[np.uint32]:
        """Return the length in bytes of each value of a column."""
        size = self._codecs[self._columns[name]].size
        if size is None:
            return self.all_values(name, "length")
        return np.full(self._first_records[-1], size, np.uint32)

    def all_values(self, name: str, row_field: str = "value") -> npt.NDArray[Any]:
        """Return all values of a fixed-size column, unchecked, or another field of its table's rows."""
        column, parts = self._columns[name], range(len(self._parts))
        return np.concatenate([self._table(part, column).rows()[row_field] for part in parts])

    def _part_of(self, number: int) -> int:
        return bisect_right(self._first_records, number) - 1

    def _table(self, part: int, column: int) -> ColumnTable:
        if table := self._tables.get((part, column)):
            return table
        folder, entry = self._parts[part].folder, self._parts[part].columns[column]
        self._files.provide(entry.table)
        table = ColumnTable(folder / entry.table.name, entry)
        if self._files is LOCAL:  # its checksums are those of its own values
            self._parts[part].refuse_other()
        return _keep_open(self._tables, (part, column), table)

    def _corrupt_error(self, name: str, place: RecordPlace, message: str) -> CorruptRecord:
        key = place.key.decode("utf-8", "replace")
        folder = self._parts[self._part_of(place.number)].folder
        return CorruptRecord(f"the column {name} {message}", path=folder, key=key)

    def close(self) -> None:
        """Close all files; the next read opens them again. No other thread may be reading."""
        shards, self._shards, self._tables, self._addresses = self._shards, {}, {}, {}
        for shard in shards.values():
            shard.close()


def _keep_open(files: dict[Any, File], number: Any, file: File) -> File:
    """Add a file to the open ones, and release those beyond MAX_OPEN; return it."""
    opened = list(files)
    for first in opened[: max(0, len(opened) + 1 - MAX_OPEN)]:
        files.pop(first, None)
    files[number] = file
    return file


def unlisted_columns(dataset: Path, listed: Collection[str]) -> list[Path]:
    """Return the column files in the folder whose names are not ``listed``, sorted."""
    paths = (path for path in dataset.iterdir() if path.name.startswith("column-"))
    return sorted(path for path in paths if OUTPUT_FILES.fullmatch(path.name) and path.name not in listed)


def remove_unlisted_columns(dataset: Path, listed: Collection[str]) -> None:
    """Remove unlisted column files. The caller holds the lock of the work folder."""
    for path in unlisted_columns(dataset, listed):
        path.unlink()
    flush_file(dataset)
