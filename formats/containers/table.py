"""Tables of fixed columns, one row per record: .npy files with bytes that depend on the rows alone."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import ManifestDamaged

from .published_file import FileEntry, read_published

Rows = npt.NDArray[np.void]


def write_table(file: BinaryIO, rows: Rows) -> None:
    """Write a table as .npy version 1.0; its bytes depend on the rows alone.

    ``np.save`` is not used: it writes through C's stdio and ignores errors of the disk.
    """
    file.write(table_header(rows.dtype, len(rows)))
    write_rows(file, rows)


def write_rows(file: BinaryIO, rows: Rows) -> None:
    """Write rows of a table after its header."""
    file.write(np.ascontiguousarray(rows).tobytes())


def read_table(
    path: Path,
    entry: FileEntry,
    row_of: Callable[[int], np.dtype[np.void] | None],
    *,
    seal: str | None = None,
) -> Rows:
    """Read a table's rows into memory, read-only.

    ``row_of`` returns the columns of a row of that many bytes, None if no row has as many. Columns and number
    of rows determine the header, and the file must begin with it. Raises ManifestDamaged if the file is not
    the one in the manifest, or not such a table; OSError. ``seal`` is as for :func:`.read_published`.
    """
    data = read_published(path, entry, seal=seal)
    start = 10 + int.from_bytes(data[8:10].tobytes(), "little")
    body = data[start:]
    row = row_of(len(body) // max(1, entry.records))
    if row is None or len(body) != row.itemsize * entry.records:
        raise _no_table(path, entry)
    if data[:start].tobytes() != table_header(row, entry.records):
        raise _no_table(path, entry)
    rows = body.view(row)
    rows.flags.writeable = False
    return rows


def _no_table(path: Path, entry: FileEntry) -> ManifestDamaged:
    return ManifestDamaged(f"is not a table of {entry.records} rows in this format", path=path)


def table_header(row: np.dtype[np.void], rows: int) -> bytes:
    """Return the header of a .npy file."""
    described = {"descr": np.lib.format.dtype_to_descr(row), "fortran_order": False, "shape": (rows,)}
    file = BytesIO()
    np.lib.format.write_array_header_1_0(file, described)
    return file.getvalue()
