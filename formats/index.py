"""The index: one row per record in stored order, kept in index.npy."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from .errors import ManifestDamaged

INDEX_NAME = "index.npy"
BOXES_NAME = "boxes.npy"

Rows = npt.NDArray[np.void]

BOX_DTYPE = np.dtype(
    [
        ("record", "<u4"),
        ("label", "<i4"),
        ("x_min", "<f4"),
        ("y_min", "<f4"),
        ("x_max", "<f4"),
        ("y_max", "<f4"),
    ]
)


def index_dtype(key_bytes: int) -> np.dtype[np.void]:
    """The columns of the index.

    ``shard`` and ``ordinal`` name the record's place; ``length`` is the image's bytes; ``width``,
    ``height`` (pixels, EXIF not applied), ``components``, ``orientation`` and ``flags``
    (:class:`~shardprep.formats.image_header.ImageFlag`) say what the image is.
    """
    return np.dtype(
        [
            ("key", f"S{key_bytes}"),
            ("label", "<i4"),
            ("shard", "<u4"),
            ("ordinal", "<u4"),
            ("length", "<u4"),
            ("crc32c", "<u4"),
            ("width", "<u4"),
            ("height", "<u4"),
            ("flags", "<u2"),
            ("components", "u1"),
            ("orientation", "u1"),
        ]
    )


def write_table(file: BinaryIO, rows: npt.NDArray[np.void]) -> None:
    """Write a table as .npy version 1.0, whose bytes depend on the rows alone.

    Not by ``np.save``: it writes through C's stdio and does not notice when the disk fails it.
    """
    header = np.lib.format.header_data_from_array_1_0(rows)
    np.lib.format.write_array_header_1_0(file, header)
    file.write(np.ascontiguousarray(rows).view(np.uint8).data)


def map_index(path: Path) -> Rows:
    """The index, mapped read-only. Raises ManifestDamaged where its columns are not an index's."""
    rows = map_table(path)
    if rows.dtype != index_dtype(rows.dtype[0].itemsize):
        raise ManifestDamaged(f"has the columns {rows.dtype.names}, which are no index's", path=path)
    return rows


def map_table(path: Path) -> npt.NDArray[np.void]:
    """A table's rows, mapped read-only: opening costs no memory, pages come as they are read.

    The caller has checked size and hash. Raises ManifestDamaged for what is not such a table.
    """
    if not path.stat().st_size:
        raise ManifestDamaged("is empty", path=path)
    try:
        rows = np.lib.format.open_memmap(path, mode="r")
    except ValueError as error:
        raise ManifestDamaged(f"is not a table: {error}", path=path) from error
    if rows.ndim != 1 or rows.dtype.names is None:
        raise ManifestDamaged(f"is not a table but {rows.dtype} {rows.shape}", path=path)
    return rows
