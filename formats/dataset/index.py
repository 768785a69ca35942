"""The index: one row per record in stored order, in index.npy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shardprep.formats.containers.container import Stored
from shardprep.formats.errors import ManifestDamaged
from shardprep.formats.images.kinds.image_info import LATER_KINDS, ImageInfo
from shardprep.formats.records.record import MAX_KEY_BYTES
from shardprep.formats.records.table_file import table_header

from .published_file import read_published

if TYPE_CHECKING:
    from .published_file import FileEntry

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
    """Return the columns of the index.

    ``shard`` and ``ordinal`` are the record's place; ``length`` is the image's length in bytes; ``width``,
    ``height`` (pixels, EXIF not applied), ``components``, ``orientation`` and ``flags``
    (:class:`~shardprep.formats.images.kinds.image_info.ImageFlag`) describe the image.
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


def kinds_in(flags: npt.NDArray[np.uint16]) -> tuple[str, ...]:
    """Return the names of the kinds other than JPEG and PNG in the column ``flags``, in their order."""
    found = int(np.bitwise_or.reduce(flags, initial=0))
    return tuple(name for name, flag in LATER_KINDS.items() if found & flag)


def read_index(path: Path, entry: FileEntry) -> Rows:
    """Read the index with :func:`read_table`. :func:`~.columns.checked_index` checks its rows."""
    return read_table(path, entry, _index_row)


def read_boxes(path: Path, entry: FileEntry) -> Rows:
    """Read the table of boxes in the same way, for :func:`~.columns.checked_boxes`."""
    return read_table(path, entry, lambda _: BOX_DTYPE)


def read_table(path: Path, entry: FileEntry, row_of: Callable[[int], np.dtype[np.void] | None]) -> Rows:
    """Read a table's rows into memory, read-only.

    ``row_of`` returns the columns of a row of that many bytes, None if no row has as many. Columns and number
    of rows determine the header, and the file must begin with it. Raises ManifestDamaged if the file is not
    the one in the manifest, or not such a table; OSError.
    """
    data = read_published(path, entry)
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


def _index_row(width: int) -> np.dtype[np.void] | None:
    key_bytes = width - index_dtype(1).itemsize + 1
    return index_dtype(key_bytes) if 1 <= key_bytes <= MAX_KEY_BYTES else None


def index_row(stored: Stored, info: ImageInfo, shard: int, ordinal: int) -> tuple[object, ...]:
    """Return a record's row of the index."""
    return (
        stored.key,
        stored.label,
        shard,
        ordinal,
        len(stored.image),
        stored.crc32c,
        info.width,
        info.height,
        info.flags,
        info.components,
        info.orientation,
    )
