"""The values of joined columns: of arrays, tables or other datasets, matched by the records' keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import SourceDamaged, SourceIncomplete, UsageError
from shardprep.formats.records.codecs import FloatCodec, IntegerCodec
from shardprep.formats.records.record import MAX_KEY_BYTES
from shardprep.formats.records.schema import ColumnChoice, Field
from shardprep.formats.runtime.files import ArchiveFile, Identity, foreign_file, hash_file
from shardprep.formats.shards.columns import RecordPlace
from shardprep.formats.shards.dataset import Dataset, open_unreplaced, splits_of
from shardprep.formats.shards.manifest import read_manifest
from shardprep.formats.shards.tables import checked_index
from shardprep.formats.sources.listing import GrowingTable, repeated_keys
from shardprep.formats.sources.lists import PATH_COLUMNS
from shardprep.formats.sources.tables import MAX_ROW_BYTES, CellKind, Lines, TableForm, encoded_cell


@dataclass(frozen=True)
class JoinedColumn:
    """A column to join: its field, its values, and their source for the manifest."""

    field: Field
    values: FileValues | DatasetValues
    custody: Mapping[str, Any]


HEADER_BYTES = 1 << 16
KINDS = "biuf"  # of dtypes: bool, signed, unsigned, float


def of_array(path: Path, choice: ColumnChoice, records: int) -> JoinedColumn:
    """Return the column of the array in a .npy file, [records, …] of bool, int, uint or float.

    Numbers, one for each record, become the kind int or float; others an array of the rows' dtype and shape.
    Raises UsageError, SourceDamaged, and SourceIncomplete for another number of rows.
    """
    with ArchiveFile(path) as file:
        with foreign_file(path, "write it with numpy.save"):
            shape, dtype, start = _header(file)
        if shape[0] != records:
            raise SourceIncomplete(f"has {shape[0]} rows, and the dataset has {records} records", path=path)
        size = math.prod(shape[1:]) * dtype.itemsize
        if file.end != start + records * size:
            raise SourceDamaged("does not have the size its header gives; copy it again", path=path)
        identity = file.identity
    field = _field_of(path, choice, dtype, shape[1:])
    offsets, sizes = start + size * np.arange(records), np.broadcast_to(np.int64(size), records)
    values = FileValues(path, identity, offsets, sizes, partial(_encoded_row, field, dtype, shape[1:]))
    return JoinedColumn(field, values, {"name": choice.name, "sha256": hash_file(path)})


def _header(file: ArchiveFile) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    head = BytesIO(file.read_at(HEADER_BYTES, 0))
    version = np.lib.format.read_magic(head)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"is an array of version {version}")
    read = np.lib.format.read_array_header_1_0 if version[0] == 1 else np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = read(head)
    if dtype.kind not in KINDS or dtype.itemsize > 8:
        raise ValueError(f"holds {dtype}; a column takes bool, int, uint and float of up to 64 bits")
    if not shape or (is_fortran and len(shape) > 1):
        raise ValueError("is not an array in C order")
    return shape, dtype, head.tell()


def _field_of(path: Path, choice: ColumnChoice, dtype: np.dtype[Any], row: tuple[int, ...]) -> Field:
    """Return the column for such rows. Raises UsageError for a kind that cannot hold them."""
    exact = f"{dtype.newbyteorder('=').name}[{','.join(map(str, row))}]"
    fits = [exact]
    if not row and dtype.kind != "b":
        fits = ["float", exact] if dtype.kind == "f" else ["int", "float", exact]
    found = Field(choice.name, choice.kind or fits[0])
    if found.kind not in fits:
        raise UsageError(f"holds {exact}, which is not {found.kind}; leave out the kind", path=path)
    return found


def _encoded_row(field: Field, dtype: np.dtype[Any], shape: tuple[int, ...], data: bytes) -> bytes:
    row = np.frombuffer(data, dtype).reshape(shape)
    if isinstance(field.codec, IntegerCodec | FloatCodec):
        return field.codec.encode(row.item())
    return field.codec.encode(row.astype(dtype.newbyteorder("<")))


@dataclass(frozen=True)
class FileValues:
    """The values of a column for some records, in their stored order, ``encoded`` from rows of a file.

    A row has an offset and a length in bytes. Picklable.
    """

    path: Path
    identity: Identity
    offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    encoded: Callable[[bytes], bytes]

    def only(self, first: int, last: int) -> FileValues:
        """Return the values of the records from ``first`` to before ``last`` alone."""
        return replace(self, offsets=self.offsets[first:last], lengths=self.lengths[first:last])

    def size(self) -> int:
        """Return about how many bytes all values take."""
        return int(self.lengths.sum())

    @contextmanager
    def opened(self) -> Iterator[Callable[[int], bytes]]:
        """Open the values for this process; the context's function returns one, by its number.

        The function raises BadValue, DataError and OSError. Entering raises SourceDamaged if the values
        changed since the join was planned.
        """
        with ArchiveFile(self.path, self.identity) as file:
            yield partial(self._value, file)

    def _value(self, file: ArchiveFile, number: int) -> bytes:
        length, offset = int(self.lengths[number]), int(self.offsets[number])
        data = file.read_at(length, offset)
        if len(data) < length:
            raise SourceDamaged("ends before its last row does; start again", path=self.path)
        with foreign_file(self.path, "start again", place=lambda: f"the row at byte {offset}: "):
            return self.encoded(data)

    def where(self, number: int) -> str:
        """Return the place of a value, for messages."""
        return f"{self.path}, the row at byte {self.offsets[number]}"


Keys = npt.NDArray[np.bytes_]


def matched(keys: Keys, partners: Keys, path: Path) -> npt.NDArray[np.int64]:
    """Return for each record the place of its partner, int64; ``path`` is that of the partners.

    Partners have the records' keys, or these without extensions, or the names of their files without
    extensions: the first that gives each record one partner, and each partner one record. Raises
    SourceIncomplete, which names a record without a partner, or a partner without a record.
    """
    closest, most = (keys, partners), -1
    for mine, others in zip(_forms(keys), _forms(partners), strict=True):
        if not repeated_keys(mine) and not repeated_keys(others):
            if len(mine) == len(others):
                order, theirs = np.argsort(mine, kind="stable"), np.argsort(others, kind="stable")
                if (mine[order] == others[theirs]).all():
                    places = np.empty(len(mine), np.int64)
                    places[order] = theirs
                    return places
            found = int(np.isin(mine, others).sum())
            if found > most:
                closest, most = (mine, others), found
    raise _unmatched(keys, partners, *closest, path)


def _unmatched(keys: Keys, partners: Keys, mine: Keys, others: Keys, path: Path) -> SourceIncomplete:
    if repeated := repeated_keys(others):
        message = "occurs twice, but a record has one partner; remove one"
        return SourceIncomplete(message, path=path, key=repeated[0].decode())
    missing, surplus = keys[~np.isin(mine, others)], partners[~np.isin(others, mine)]
    if not len(missing):
        message = f"no record of the dataset has this key (one of {len(surplus)})"
        return SourceIncomplete(message, path=path, key=surplus[0].decode())
    message = f"this record of the dataset has no partner here (one of {len(missing)})"
    if len(surplus):
        message += f"; {surplus[0].decode()} here belongs to no record (one of {len(surplus)})"
    return SourceIncomplete(message, path=path, key=missing[0].decode())


def _forms(keys: Keys) -> Iterator[Keys]:
    yield keys
    for form in (_without_extension, _file_name):
        yield np.array([form(key) for key in keys.tolist()], np.bytes_)


def _without_extension(key: bytes) -> bytes:
    stem, _, extension = key.rpartition(b".")
    return key if not stem or stem.endswith(b"/") or b"/" in extension else stem


def _file_name(key: bytes) -> bytes:
    return _without_extension(key).rpartition(b"/")[2]


def of_dataset(folder: Path, column: str, choice: ColumnChoice, keys: Keys, split: str) -> JoinedColumn:
    """Return the column of the dataset in ``folder``, or of its split of that name.

    ``column`` is the name of one of its columns, empty for its images. Raises UsageError, SourceIncomplete,
    and what reading a dataset raises.
    """
    folder = splits_of(folder).get(split, folder)
    manifest = read_manifest(folder)
    if not column and not manifest.has_images:
        raise UsageError("has no images; name one of its columns with FOLDER#COLUMN", path=folder)
    found = manifest.schema[column] if column else Field(choice.name, "image")
    if choice.kind not in ("", found.kind):
        raise UsageError(f"holds the kind {found.kind}, not {choice.kind}; leave out the kind", path=folder)
    places = matched(keys, checked_index(folder, manifest)["key"], folder)
    custody = {"name": choice.name, "root": manifest.root} | ({"column": column} if column else {})
    values = DatasetValues(folder.resolve(), manifest.root, column, places)
    return JoinedColumn(Field(choice.name, found.kind, found.classes), values, custody)


@dataclass(frozen=True)
class DatasetValues:
    """The values at ``places``, which are numbers of records of the dataset in ``folder``.

    The methods are those of :class:`FileValues`.
    """

    folder: Path
    root: str
    column: str
    places: npt.NDArray[np.int64]

    def only(self, first: int, last: int) -> DatasetValues:
        return replace(self, places=self.places[first:last])

    def size(self) -> int:
        with open_unreplaced(self.folder, self.root) as dataset:
            lengths = dataset.columns[self.column].lengths() if self.column else dataset.index["length"]
            return int(lengths[self.places].sum(dtype=np.int64))

    @contextmanager
    def opened(self) -> Iterator[Callable[[int], bytes]]:
        with open_unreplaced(self.folder, self.root) as dataset:
            yield partial(self._value, dataset)

    def _value(self, dataset: Dataset, number: int) -> bytes:
        place = int(self.places[number])
        if not self.column:
            return dataset[place].image
        row = dataset.index[place]
        at = RecordPlace(place, int(row["shard"]), int(row["ordinal"]), row["key"].item())
        return dataset.columns[self.column].data(at)

    def where(self, number: int) -> str:
        return f"{self.folder}, record {self.places[number]}"


KEY_NAMES = ("key", "file_name", *PATH_COLUMNS)


def of_table(path: Path, header: str, choice: ColumnChoice, keys: Keys) -> JoinedColumn:
    """Return the column under ``header`` of a table with a column of keys; its kind may be guessed.

    Raises SourceDamaged with the line of a row that cannot be used, SourceIncomplete, and UsageError.
    """
    table = GrowingTable(np.dtype([("key", "S1"), ("offset", "<i8"), ("length", "<i8")]))
    line = 1  # 0 between two rows
    with ArchiveFile(path) as file:
        lines = Lines(file, MAX_ROW_BYTES)
        with foreign_file(path, "correct the table", place=lambda: f"line {line or lines.number}: "):
            form = TableForm.of(file)
            of_keys = "column of keys or paths (key, file_name, path, …); its columns are"
            keys_name = _first_in(form, KEY_NAMES, of_keys)
            _first_in(form, [header], f"column {header!r}; name one as FILE#COLUMN, of")
            kind = CellKind(header, choice if choice.kind else None, typed=not form.delimiter)
            line = 0
            for row in form.rows(lines):
                if isinstance(row, ValueError):
                    raise row
                line = row.line
                kind.add(row.cells[header])
                table.append((_key(row.cells[keys_name]), row.offset, row.length))
                line = 0
        identity = file.identity
    rows = table.finish()
    places = matched(keys, rows["key"], path)
    field = replace(kind.field, name=choice.name) if choice.kind else Field(choice.name, kind.guess)
    encoded = partial(_encoded_cell, field, form, header)
    values = FileValues(path, identity, rows["offset"][places], rows["length"][places], encoded)
    custody = {"name": choice.name, "sha256": hash_file(path)}
    return JoinedColumn(field, values, custody | ({"column": header} if header != choice.name else {}))


def _first_in(form: TableForm, names: Sequence[str], missing: str) -> str:
    """Return the first of the names that is a column's. Raises ValueError, which says what is missing."""
    found = next((name for name in names if name in form.names), None)
    if found is None:
        raise ValueError(f"has no {missing}: {', '.join(form.names)[:200]}")
    return found


def _key(cell: object) -> bytes:
    key = str(cell).encode() if isinstance(cell, str) or type(cell) is int else b""
    if not 0 < len(key) <= MAX_KEY_BYTES:
        raise ValueError("has no key")
    return key


def _encoded_cell(field: Field, form: TableForm, header: str, row: bytes) -> bytes:
    return encoded_cell(field, form.cells(row)[header], typed=not form.delimiter)
