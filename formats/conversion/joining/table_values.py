"""A joined column of a table: CSV or JSON lines with the records' keys."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardprep.formats.columns.column_choice import ColumnChoice
from shardprep.formats.columns.schema import Field
from shardprep.formats.errors import SourceDamaged
from shardprep.formats.records.record import MAX_KEY_BYTES
from shardprep.formats.sources.image_columns.tables.cell_kinds import CellKind
from shardprep.formats.sources.image_columns.tables.cell_values import encoded_cell
from shardprep.formats.sources.image_columns.tables.table_form import MAX_ROW_BYTES, TableForm, TableRow
from shardprep.formats.sources.labelled_list.lines import Lines
from shardprep.formats.sources.listing.entry_table import GrowingTable
from shardprep.formats.system.atomic_write import hash_file
from shardprep.formats.system.foreign_file import foreign_file
from shardprep.formats.system.regular_file import ArchiveFile, Identity

from .joined_values import JoinedColumn, JoinedValues
from .matching import Keys, matched

KEY_NAMES = ("key", "file_name")


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
        raise ValueError(f"has no column key, and none file_name; its columns are: {there}")
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
    """The cells at the place ``at`` of rows, each of which has an offset and a length in bytes."""

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
