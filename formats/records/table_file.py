"""Tables of rows as .npy files of version 1.0, whose bytes depend on the rows alone."""

from __future__ import annotations

from io import BytesIO
from typing import BinaryIO

import numpy as np
import numpy.typing as npt


def write_table(file: BinaryIO, rows: npt.NDArray[np.void]) -> None:
    """Write a table. Raises OSError.

    ``np.save`` is not used: it writes through C's stdio and ignores errors of the disk.
    """
    file.write(table_header(rows.dtype, len(rows)))
    file.write(np.ascontiguousarray(rows).view(np.uint8).data)


def table_header(row: np.dtype[np.void], rows: int) -> bytes:
    """Return the header of a table: columns and number of rows determine it."""
    described = {"descr": np.lib.format.dtype_to_descr(row), "fortran_order": False, "shape": (rows,)}
    file = BytesIO()
    np.lib.format.write_array_header_1_0(file, described)
    return file.getvalue()
