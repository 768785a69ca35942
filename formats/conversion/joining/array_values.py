"""A joined column of a NumPy array: a row for each record, in stored order."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from shardprep.formats.columns.column_choice import ColumnChoice
from shardprep.formats.columns.numeric import FloatCodec, IntegerCodec
from shardprep.formats.columns.schema import Field
from shardprep.formats.errors import SourceDamaged, SourceIncomplete, UsageError
from shardprep.formats.system.atomic_write import hash_file
from shardprep.formats.system.foreign_file import foreign_file
from shardprep.formats.system.regular_file import ArchiveFile, Identity

from .joined_values import JoinedColumn, JoinedValues

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
            raise SourceDamaged("has not the size that its header says; copy it again", path=path)
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
    if dtype.kind not in KINDS or dtype.names:
        raise ValueError(f"holds {dtype}; a column takes bool, int, uint and float")
    if not shape or (is_fortran and len(shape) > 1):
        raise ValueError("is no array of rows in C order")
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
            raise UsageError(f"holds {exact}, which is no {self.of.kind}; leave out the kind", path=self.path)

    def _encoded(self, data: bytes) -> bytes:
        row = np.frombuffer(data, self.dtype).reshape(self.row)
        if isinstance(self.of.codec, IntegerCodec | FloatCodec):
            return self.of.codec.encode(row.item())
        return self.of.codec.encode(row.astype(self.dtype.newbyteorder("<")))
