"""The index: one row per record in stored order, in index.npy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shardprep.formats.containers.container import Stored
from shardprep.formats.containers.table import Rows, read_table
from shardprep.formats.images.kinds.image_info import LATER_KINDS, ImageInfo
from shardprep.formats.records.record import MAX_KEY_BYTES

if TYPE_CHECKING:
    from shardprep.formats.containers.published_file import FileEntry

INDEX_NAME = "index.npy"
BOXES_NAME = "boxes.npy"


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


def read_index(path: Path, entry: FileEntry, *, seal: str | None = None) -> Rows:
    """Read the index with :func:`read_table`. :func:`~.table_checks.checked_index` checks its rows."""
    return read_table(path, entry, index_row_of, seal=seal)


def index_row_of(width: int) -> np.dtype[np.void] | None:
    """Return the columns of a row of so many bytes, None if no index has such rows."""
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
