"""The values of joined columns: of arrays, tables or other datasets, matched by the records' keys."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import Any, Self

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
from shardprep.formats.sources.tables import MAX_ROW_BYTES, CellKind, Lines, TableForm, TableRow, encoded_cell


class JoinedValues(AbstractContextManager["JoinedValues"], ABC):
    """The encoded values of a column for some records, in their stored order.

    Entering opens them for this process, and copies and pickles are made while they are closed. Not
    thread-safe. Entering raises SourceDamaged if they changed since the join was planned.
    """

    @abstractmethod
    def only(self, first: int, last: int) -> Self:
        """Return the values of the records from ``first`` to before ``last`` alone."""

    @abstractmethod
    def bytes_of(self, records: int) -> int:
        """Return about how many bytes the values of all ``records`` take; to be called while closed."""

    @abstractmethod
    def data(self, number: int) -> bytes:
        """Return a value. Raises BadValue, DataError and OSError."""

    @abstractmethod
    def where(self, number: int) -> str:
        """Return the place of a value, for messages."""


@dataclass(frozen=True)
class JoinedColumn:
    """A column to join: its field, its values, and their source for the manifest."""

    field: Field
    values: JoinedValues
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
        if file.end != start + math.prod(shape) * dtype.itemsize:
            raise SourceDamaged("does not have the size its header gives; copy it again", path=path)
        found = Field(choice.name, choice.kind or _kind_of(dtype, shape[1:]))
        values = ArrayValues(path, file.identity, found, dtype, shape[1:], start)
        values.refuse_kind()
    return JoinedColumn(found, values, {"name": choice.name, "sha256": hash_file(path)})


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


def _kind_of(dtype: np.dtype[Any], row: tuple[int, ...]) -> str:
    if not row and dtype.kind != "b":
        return "float" if dtype.kind == "f" else "int"
    return f"{dtype.newbyteorder('=').name}[{','.join(map(str, row))}]"


@dataclass
class ArrayValues(JoinedValues):
    """The rows of an array from the byte ``start`` of the file at ``path``."""

    path: Path
    identity: Identity
    of: Field
    dtype: np.dtype[Any]
    row: tuple[int, ...]
    start: int
    _file: ArchiveFile | None = field(default=None, init=False, repr=False, compare=False)

    def __enter__(self) -> ArrayValues:
        self._file = ArchiveFile(self.path, self.identity).__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            file.__exit__(kind)

    @property
    def size(self) -> int:
        """The bytes of a row."""
        return math.prod(self.row) * self.dtype.itemsize

    def only(self, first: int, last: int) -> ArrayValues:
        return replace(self, start=self.start + first * self.size)

    def bytes_of(self, records: int) -> int:
        return records * self.size

    def data(self, number: int) -> bytes:
        if self._file is None:
            raise ValueError("the values are closed")
        return self._encoded(self._file.read_at(self.size, self.start + number * self.size))

    def where(self, number: int) -> str:
        return f"{self.path}, byte {self.start + number * self.size}"

    def refuse_kind(self) -> None:
        """Raise UsageError for a kind of column that cannot hold these rows."""
        fits = _kind_of(self.dtype, self.row)
        numbers = {"int": ("int", "float"), "float": ("float",)}.get(fits, ())
        exact = f"{self.dtype.newbyteorder('=').name}[{','.join(map(str, self.row))}]"
        if self.of.kind not in (fits, exact, *numbers):
            raise UsageError(
                f"holds {exact}, which is not {self.of.kind}; leave out the kind", path=self.path
            )

    def _encoded(self, data: bytes) -> bytes:
        row = np.frombuffer(data, self.dtype).reshape(self.row)
        if isinstance(self.of.codec, IntegerCodec | FloatCodec):
            return self.of.codec.encode(row.item())
        return self.of.codec.encode(row.astype(self.dtype.newbyteorder("<")))


Keys = npt.NDArray[np.bytes_]


def matched(keys: Keys, partners: Keys, path: Path) -> npt.NDArray[np.int64]:
    """Return for each record the place of its partner, int64; ``path`` is that of the partners.

    Partners have the records' keys, or these without extensions, or the names of their files without
    extensions: the first that gives each record one partner, and each partner one record. Raises
    SourceIncomplete, which names a record without a partner, or a partner without a record.
    """
    closest, most = (keys, partners), -1
    for form in (_as_it_is, _without_extension, _file_name):
        mine, others = form(keys), form(partners)
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
    key = (missing if len(missing) else surplus)[0].decode()
    of_record = f"this record of the dataset has no partner here (one of {len(missing)})"
    of_partner = f"no record of the dataset has this key (one of {len(surplus)})"
    parts = [of_record] * bool(len(missing)) + [of_partner] * (not len(missing))
    if len(missing) and len(surplus):
        parts.append(f"{surplus[0].decode()} and {len(surplus) - 1} others here belong to no record")
    return SourceIncomplete("; ".join(parts), path=path, key=key)


def _as_it_is(keys: Keys) -> Keys:
    return keys


def _without_extension(keys: Keys) -> Keys:
    return _each(keys, lambda key: key[: len(key) - len(_extension(key))])


def _file_name(keys: Keys) -> Keys:
    return _each(_without_extension(keys), lambda key: key.rpartition(b"/")[2])


def _extension(key: bytes) -> bytes:
    name = key.rpartition(b"/")[2]
    stem, dot, extension = name.rpartition(b".")
    return dot + extension if stem else b""


def _each(keys: Keys, form: Callable[[bytes], bytes]) -> Keys:
    return np.array([form(key) for key in keys.tolist()], np.bytes_)


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


@dataclass
class DatasetValues(JoinedValues):
    """The values at ``places``, which are numbers of records of the dataset in ``folder``."""

    folder: Path
    root: str
    column: str
    places: npt.NDArray[np.int64]
    _dataset: Dataset | None = field(default=None, init=False, repr=False, compare=False)

    def __enter__(self) -> DatasetValues:
        self._dataset = open_unreplaced(self.folder, self.root)
        return self

    def __exit__(self, *exc: object) -> None:
        dataset, self._dataset = self._dataset, None
        if dataset is not None:
            dataset.close()

    def only(self, first: int, last: int) -> DatasetValues:
        return replace(self, places=self.places[first:last])

    def bytes_of(self, records: int) -> int:
        with open_unreplaced(self.folder, self.root) as dataset:
            lengths = dataset.columns[self.column].lengths() if self.column else dataset.index["length"]
            return int(lengths[self.places].sum(dtype=np.int64))

    def data(self, number: int) -> bytes:
        if self._dataset is None:
            raise ValueError("the values are closed")
        place = int(self.places[number])
        if not self.column:
            return self._dataset[place].image
        row = self._dataset.index[place]
        at = RecordPlace(place, int(row["shard"]), int(row["ordinal"]), row["key"].item())
        return self._dataset.columns[self.column].data(at)

    def where(self, number: int) -> str:
        return f"{self.folder}, record {self.places[number]}"


KEY_NAMES = ("key", "file_name", *PATH_COLUMNS)


def of_table(path: Path, header: str, choice: ColumnChoice, keys: Keys) -> JoinedColumn:
    """Return the column under ``header`` of a table with a column of keys; its kind may be guessed.

    Raises SourceDamaged with the line of a row that cannot be used, SourceIncomplete, and UsageError.
    """
    with ArchiveFile(path) as file:
        with _at(path, lambda: 1):
            form = TableForm.of(file)
            key_at, at = _place_of_key(form), _place_of(form, header)
        kind = CellKind(header, choice if choice.kind else None, typed=not form.delimiter)
        rows = _rows(path, file, form, key_at, at, kind)
        identity = file.identity
    places = matched(keys, rows["key"], path)
    field = replace(kind.field, name=choice.name) if choice.kind else Field(choice.name, kind.guess)
    values = TableValues(path, identity, form, at, field, rows["offset"][places], rows["length"][places])
    custody = {"name": choice.name, "sha256": hash_file(path)}
    return JoinedColumn(field, values, custody | ({"column": header} if header != choice.name else {}))


def _place_of_key(form: TableForm) -> int:
    name = next((name for name in KEY_NAMES if name in form.names), None)
    if name is None:
        there = ", ".join(form.names)[:200]
        raise ValueError(
            f"has no column of keys or paths (key, file_name, path, …); its columns are: {there}"
        )
    return form.names.index(name)


def _place_of(form: TableForm, header: str) -> int:
    if header not in form.names:
        there = ", ".join(form.names)[:200]
        raise ValueError(f"has no column {header!r}; name one as FILE#COLUMN, of: {there}")
    return form.names.index(header)


def _rows(
    path: Path, file: ArchiveFile, form: TableForm, key_at: int, at: int, kind: CellKind
) -> npt.NDArray[np.void]:
    """Return the key and the place of each row; raise SourceDamaged for the first that is none."""
    lines, first = Lines(file, MAX_ROW_BYTES), array("q")
    table = GrowingTable(np.dtype([("key", "S1"), ("offset", "<i8"), ("length", "<i8")]))
    with _at(path, lambda: first[-1] if first else lines.number):
        for row in form.rows(lines):
            first.append(row.line if isinstance(row, TableRow) else lines.number)
            if isinstance(row, ValueError):
                raise row
            kind.add(row.cells[at])
            table.append((_key(row.cells[key_at]), row.offset, row.length))
            first.pop()
    return table.finish()


def _key(cell: object) -> bytes:
    key = str(cell).encode() if isinstance(cell, str) or type(cell) is int else b""
    if not 0 < len(key) <= MAX_KEY_BYTES:
        raise ValueError("has no key")
    return key


def _at(path: Path, line: Callable[[], int]) -> AbstractContextManager[None]:
    return foreign_file(path, "correct the table", place=lambda: f"line {line()}: ")


@dataclass
class TableValues(JoinedValues):
    """The cells at the place ``at`` of rows with an offset and a length in bytes."""

    path: Path
    identity: Identity
    form: TableForm
    at: int
    of: Field
    offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    _file: ArchiveFile | None = field(default=None, init=False, repr=False, compare=False)

    def __enter__(self) -> TableValues:
        self._file = ArchiveFile(self.path, self.identity).__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            file.__exit__(kind)

    def only(self, first: int, last: int) -> TableValues:
        return replace(self, offsets=self.offsets[first:last], lengths=self.lengths[first:last])

    def bytes_of(self, records: int) -> int:
        return int(self.lengths.sum())

    def data(self, number: int) -> bytes:
        if self._file is None:
            raise ValueError("the values are closed")
        length, offset = int(self.lengths[number]), int(self.offsets[number])
        data = self._file.read_at(length, offset)
        if len(data) < length:
            raise SourceDamaged("ends before its last row does; start again", path=self.path)
        with foreign_file(self.path, "start again", place=lambda: f"the row at byte {offset}: "):
            cells = self.form.cells(data)
        return encoded_cell(self.of, cells[self.at], typed=not self.form.delimiter)

    def where(self, number: int) -> str:
        return f"{self.path}, the row at byte {self.offsets[number]}"
