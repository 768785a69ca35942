"""The index (one row per record, in stored order), and the checks of all tables against the manifest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import ManifestDamaged
from shardprep.formats.images.info import LATER_KINDS, ImageInfo
from shardprep.formats.records.codecs import MAX_VALUE_BYTES
from shardprep.formats.records.labels import UNLABELLED
from shardprep.formats.records.record import MAX_IMAGE_BYTES, MAX_KEY_BYTES
from shardprep.formats.shards.columns import BOX_COLUMNS, BoxTable, ColumnEntry, ColumnTable
from shardprep.formats.shards.manifest import Manifest
from shardprep.formats.shards.read import Rows, StoredRecord, read_table

Numbers = npt.NDArray[np.int64]

INDEX_NAME = "index.npy"
BOXES_NAME = "boxes.npy"


def index_dtype(key_bytes: int, *, offsets: bool = True) -> np.dtype[np.void]:
    """Return the row dtype of the index.

    ``shard`` and ``ordinal`` are the record's place; ``length`` is the image's size in bytes, and ``offset``
    its start in the shard file or archive; ``width``, ``height`` (pixels, EXIF not applied), ``components``,
    ``orientation`` and ``flags`` (:class:`~shardprep.formats.images.info.ImageFlag`) describe it. Format 1.0
    has no ``offsets``.
    """
    columns = [
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
    return np.dtype([*columns, ("offset", "<u8")] if offsets else columns)


def with_offsets(rows: Rows) -> Rows:
    """Return index rows with a column ``offset``, which is 0 for format 1.0."""
    if "offset" in (rows.dtype.names or ()):
        return rows
    made = np.zeros(len(rows), index_dtype(rows.dtype["key"].itemsize))
    for name in rows.dtype.names or ():
        made[name] = rows[name]
    made.flags.writeable = False
    return made


def kinds_in(flags: npt.NDArray[np.uint16]) -> tuple[str, ...]:
    """Return the names, in order, of the image kinds other than JPEG and PNG in the column ``flags``."""
    found = int(np.bitwise_or.reduce(flags, initial=0))
    return tuple(name for name, flag in LATER_KINDS.items() if found & flag)


def index_row_of(width: int, *, offsets: bool) -> np.dtype[np.void] | None:
    """Return the dtype of an index row of ``width`` bytes, or None if there is none."""
    key_bytes = width - index_dtype(1, offsets=offsets).itemsize + 1
    return index_dtype(key_bytes, offsets=offsets) if 1 <= key_bytes <= MAX_KEY_BYTES else None


def index_row(stored: StoredRecord, info: ImageInfo, shard: int, ordinal: int) -> tuple[object, ...]:
    record = stored.key, stored.label, shard, ordinal, len(stored.image), stored.crc32c
    return (*record, info.width, info.height, info.flags, info.components, info.orientation, stored.offset)


def checked_index(dataset: Path, manifest: Manifest, *, verify: bool = True) -> Rows:
    """Read the index of a dataset folder into memory, and check it against the manifest.

    The rows must be the shards' records in order, labels in the label space, keys UTF-8, and lengths valid
    for images, within the shards, and consistent with the total. Only reading the records shows whether the
    rows match them. The column ``offset`` is 0 for format 1.0. Without ``verify``, a file with a
    :class:`.Seal` is not hashed. Raises ManifestDamaged, OSError.
    """
    entry, path = manifest.table(INDEX_NAME), dataset / INDEX_NAME
    if entry is None:
        raise ManifestDamaged(f"lists no {INDEX_NAME}", path=dataset)
    row_of = partial(index_row_of, offsets=manifest.offsets)
    rows = with_offsets(read_table(path, entry, row_of, seal=None if verify else manifest.root))
    if len(rows) != manifest.records:
        raise ManifestDamaged(f"has {len(rows)} rows, not {manifest.records}", path=path)
    if not _index_fits(rows, manifest):
        raise _misfit(path)
    return rows


def checked_boxes(dataset: Path, manifest: Manifest) -> Rows | None:
    """Read and check the table of boxes, if there is one. Raises ManifestDamaged, OSError."""
    table = box_table(dataset, manifest)
    return table.rows() if table else None


def box_table(dataset: Path, manifest: Manifest, labels: str = "sorted_wnid0") -> BoxTable | None:
    """Return the unread table of boxes, or None. Raises UsageError for an unknown label space."""
    entry = manifest.table(BOXES_NAME)
    if entry is None:
        return None
    return BoxTable(dataset, entry, manifest.records, tuple(manifest.labels.mapping(labels).tolist()))


def box_columns(manifest: Manifest) -> tuple[str, ...]:
    """Return the names of a record's box values: BOX_COLUMNS, without names that a column has taken."""
    if manifest.table(BOXES_NAME) is None:
        return ()
    return tuple(name for name in BOX_COLUMNS if name not in manifest.schema)


def checked_column(dataset: Path, manifest: Manifest, entry: ColumnEntry) -> Rows | None:
    """Check a column's table: only the header for fixed-size values, else the lengths, which are returned.

    Lengths must be valid for values, and within the shards. Raises ManifestDamaged, OSError.
    """
    path, row = dataset / entry.table.name, entry.row
    if entry.field.is_fixed:
        ColumnTable(path, entry).close()
        return None
    rows = read_table(path, entry.table, lambda width: row if width == row.itemsize else None)
    sizes = [shard.size for shard in entry.shards]
    sums = _lengths(rows, manifest, sizes, MAX_VALUE_BYTES)
    if sums is None or (sums > sizes).any():
        raise _misfit(path)
    return rows


def _misfit(path: Path) -> ManifestDamaged:
    return ManifestDamaged("has rows that do not fit the manifest", path=path)


_ROWS_AT_ONCE = 1 << 16  # bounds the memory for checking a large index


def _chunks(rows: Rows, manifest: Manifest) -> Iterator[tuple[Rows, Numbers, Numbers]]:
    """Yield chunks of a table's rows, with the shard and ordinal of each row."""
    starts = np.cumsum([0, *(shard.records for shard in manifest.shards)])
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        chunk = rows[start : start + _ROWS_AT_ONCE]
        numbers = np.arange(start, start + len(chunk))
        shards = np.searchsorted(starts, numbers, side="right") - 1
        yield chunk, shards, numbers - starts[shards]


def _index_fits(rows: Rows, manifest: Manifest) -> bool:
    for chunk, shards, ordinals in _chunks(rows, manifest):
        if not ((chunk["shard"] == shards) & (chunk["ordinal"] == ordinals)).all() or not _keys_ok(chunk):
            return False
    if rows["label"].min() < UNLABELLED or rows["label"].max() >= len(manifest.labels):
        return False
    archive = manifest.archive
    sizes = [archive.size if archive else shard.size for shard in manifest.shards]
    sums = _lengths(rows, manifest, sizes, MAX_IMAGE_BYTES)
    return (
        sums is not None
        and sums.sum() == manifest.image_bytes
        and not (sums > list(manifest.image_room)).any()
    )


def _lengths(rows: Rows, manifest: Manifest, sizes: Sequence[int], most: int) -> Numbers | None:
    """Return the sums of a table's lengths by shard; None if one exceeds ``most`` or the size of its file."""
    if rows["length"].max() > most:
        return None
    sums, room = np.zeros(len(sizes), np.int64), np.array(sizes, np.uint64)
    for chunk, shards, _ in _chunks(rows, manifest):
        np.add.at(sums, shards, chunk["length"])
        if "offset" in (rows.dtype.names or ()):
            offsets, inside = chunk["offset"], room[shards]
            if ((offsets > inside) | (chunk["length"] > inside - np.minimum(offsets, inside))).any():
                return None
    return sums


def _keys_ok(rows: Rows) -> bool:
    """Whether all keys are UTF-8; only those that are not ASCII are decoded."""
    keys = rows.view(np.uint8).reshape(len(rows), -1)[:, : rows.dtype["key"].itemsize]
    others = (keys >= 0x80).any(axis=1)
    try:
        b"\0".join(rows["key"][others].tolist()).decode()
    except UnicodeDecodeError:
        return False
    return True
