"""The index, one row per record in stored order, and the checks of all tables against the manifest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import ManifestDamaged
from shardprep.formats.images.info import LATER_KINDS, ImageInfo
from shardprep.formats.records.codecs import MAX_VALUE_BYTES
from shardprep.formats.records.labels import UNLABELLED, LabelSpace
from shardprep.formats.records.record import MAX_IMAGE_BYTES, MAX_KEY_BYTES
from shardprep.formats.shards.columns import BOX_COLUMNS, BoxTable, ColumnEntry
from shardprep.formats.shards.container import StoredRecord
from shardprep.formats.shards.files import Rows, ShardFile, read_table, table_header
from shardprep.formats.shards.manifest import Manifest

INDEX_NAME = "index.npy"
BOXES_NAME = "boxes.npy"


def index_dtype(key_bytes: int, *, offsets: bool = True) -> np.dtype[np.void]:
    """Return the columns of the index.

    ``shard`` and ``ordinal`` are the record's place; ``length`` is the image's length in bytes; ``width``,
    ``height`` (pixels, EXIF not applied), ``components``, ``orientation`` and ``flags``
    (:class:`~shardprep.formats.images.info.ImageFlag`) describe the image; ``offset`` is where it begins in
    the shard's file, or in the archive that it stays in. Format 1.0 has no ``offsets``.
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
    """Return rows of an index with the column ``offset``, which is 0 where the index is of format 1.0."""
    if "offset" in (rows.dtype.names or ()):
        return rows
    made = np.zeros(len(rows), index_dtype(rows.dtype["key"].itemsize))
    for name in rows.dtype.names or ():
        made[name] = rows[name]
    made.flags.writeable = False
    return made


def kinds_in(flags: npt.NDArray[np.uint16]) -> tuple[str, ...]:
    """Return the names of the kinds other than JPEG and PNG in the column ``flags``, in their order."""
    found = int(np.bitwise_or.reduce(flags, initial=0))
    return tuple(name for name, flag in LATER_KINDS.items() if found & flag)


def index_row_of(width: int, *, offsets: bool) -> np.dtype[np.void] | None:
    """Return the columns of a row of so many bytes, None if no index has such rows."""
    key_bytes = width - index_dtype(1, offsets=offsets).itemsize + 1
    return index_dtype(key_bytes, offsets=offsets) if 1 <= key_bytes <= MAX_KEY_BYTES else None


def index_row(stored: StoredRecord, info: ImageInfo, shard: int, ordinal: int) -> tuple[object, ...]:
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
        stored.offset,
    )


_ROWS_AT_ONCE = 1 << 16


def checked_index(dataset: Path, manifest: Manifest, *, verify: bool = True) -> Rows:
    """Read the index of a dataset folder into memory, and check it against the manifest.

    Its rows have the column ``offset``, which is 0 in an index of format 1.0. They are the shards' records,
    one after the other; labels are in the label space; keys are UTF-8;
    lengths are possible for images, fit the shards and add up. Whether the rows match the records is only
    known by reading these. Without ``verify``, a file with a :class:`.Seal` is not hashed. Raises
    ManifestDamaged, OSError.
    """
    entry, path = manifest.table(INDEX_NAME), dataset / INDEX_NAME
    if entry is None:
        raise ManifestDamaged(f"lists no {INDEX_NAME}", path=dataset)
    row_of = partial(index_row_of, offsets=manifest.offsets)
    rows = with_offsets(read_table(path, entry, row_of, seal=None if verify else manifest.root))
    if len(rows) != manifest.records:
        raise ManifestDamaged(f"has {len(rows)} rows, not {manifest.records}", path=path)
    _refuse(path, _index_issues(rows, manifest))
    return rows


def checked_boxes(dataset: Path, manifest: Manifest) -> Rows | None:
    """Read the table of boxes, None if there is none: of existing records, in their order, within the image.

    Raises ManifestDamaged, OSError.
    """
    table = box_table(dataset, manifest)
    return table.rows() if table else None


def box_table(dataset: Path, manifest: Manifest, labels: str = "sorted_wnid0") -> BoxTable | None:
    """Return the table of boxes with labels of this space, unread; None if there is none.

    Raises UsageError for unknown labels.
    """
    entry = manifest.table(BOXES_NAME)
    if entry is None:
        return None
    return BoxTable(dataset, entry, manifest.records, tuple(manifest.labels.mapping(labels).tolist()))


def box_columns(manifest: Manifest) -> tuple[str, ...]:
    """Return the names of the boxes in records: those of BOX_COLUMNS that no column has."""
    if manifest.table(BOXES_NAME) is None:
        return ()
    return tuple(name for name in BOX_COLUMNS if name not in manifest.schema)


def checked_column(dataset: Path, manifest: Manifest, entry: ColumnEntry) -> Rows | None:
    """Check a column's table, and return its rows where they are lengths; None where they are the values.

    Lengths are possible for values, and fit the shards. Values are not read here: they may be many. Raises
    ManifestDamaged, OSError.
    """
    path, row = dataset / entry.table.name, entry.row
    if entry.field.is_fixed:
        _check_header(path, table_header(row, entry.table.records), row.itemsize * entry.table.records)
        return None
    rows = read_table(path, entry.table, lambda width: row if width == row.itemsize else None)
    starts = np.cumsum([0, *(shard.records for shard in manifest.shards)])
    _refuse(path, _value_issues(rows, starts, entry))
    return rows


def _check_header(path: Path, header: bytes, body: int) -> None:
    with closing(ShardFile(path)) as file:
        if file.size != len(header) + body or file.read_at(len(header), 0) != header:
            raise ManifestDamaged("is not a table of its column; prep repair rebuilds it", path=path)


def _value_issues(rows: Rows, starts: npt.NDArray[np.int64], entry: ColumnEntry) -> Iterator[str]:
    lengths, room = rows["length"], [shard.size for shard in entry.shards]
    if lengths.max() > MAX_VALUE_BYTES:
        yield "it has lengths that no value has"
    if (_shard_bytes(lengths, starts) > room).any():
        yield "its lengths are more than the column's shards have"
    yield from _offset_issues(rows, starts, room)


def _offset_issues(rows: Rows, starts: npt.NDArray[np.int64], sizes: Sequence[int]) -> Iterator[str]:
    """Yield the problems of the offsets of images or values in shards of these sizes."""
    if "offset" not in (rows.dtype.names or ()):
        return
    room = np.array(sizes, np.uint64)
    for chunk in _chunks(len(rows)):
        numbers = np.arange(chunk.start, min(chunk.stop, len(rows)))
        inside = room[np.searchsorted(starts, numbers, side="right") - 1]
        offsets, lengths = rows["offset"][chunk], rows["length"][chunk]
        if ((offsets > inside) | (lengths > inside - np.minimum(offsets, inside))).any():
            yield "it has records that end after their shards"
            return


def _refuse(path: Path, issues: Iterator[str]) -> None:
    if found := "; ".join(issues):
        raise ManifestDamaged(f"does not fit the manifest: {found}", path=path)


def _index_issues(rows: Rows, manifest: Manifest) -> Iterator[str]:
    starts = np.cumsum([0, *(shard.records for shard in manifest.shards)])
    if not all(_in_place(rows, chunk, starts) for chunk in _chunks(len(rows))):
        yield "its rows are not the shards' records in stored order"
    if not _labels_ok(rows, manifest.labels):
        yield "it has labels of unknown classes"
    if not all(_keys_ok(rows[chunk]) for chunk in _chunks(len(rows))):
        yield "it has keys that are not UTF-8"
    yield from _length_issues(rows["length"], starts, manifest)
    shards, archive = manifest.shards, manifest.archive
    yield from _offset_issues(rows, starts, [archive.size if archive else shard.size for shard in shards])


def _chunks(rows: int) -> Iterator[slice]:
    """Slices of all rows, so that computing with a large index takes little memory at a time."""
    return (slice(start, start + _ROWS_AT_ONCE) for start in range(0, rows, _ROWS_AT_ONCE))


def _in_place(rows: Rows, chunk: slice, starts: npt.NDArray[np.int64]) -> bool:
    """Whether each row of a chunk names the shard and ordinal of its place."""
    numbers = np.arange(chunk.start, min(chunk.stop, len(rows)))
    shards = np.searchsorted(starts, numbers, side="right") - 1
    in_shard = (rows["shard"][chunk] == shards).all()
    return bool(in_shard and (rows["ordinal"][chunk] == numbers - starts[shards]).all())


def _length_issues(
    lengths: npt.NDArray[np.uint32], starts: npt.NDArray[np.int64], manifest: Manifest
) -> Iterator[str]:
    if lengths.max() > MAX_IMAGE_BYTES:
        yield "it has lengths that no image has"
    sums = _shard_bytes(lengths, starts)
    if sums.sum() != manifest.image_bytes:
        yield f"its lengths are {sums.sum()} bytes together, not {manifest.image_bytes}"
    if (sums > list(manifest.image_room)).any():
        yield "its lengths are more than the shards have"


def _shard_bytes(lengths: npt.NDArray[np.uint32], starts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The bytes of each shard's images."""
    sums = np.zeros(len(starts) - 1, np.int64)
    for chunk in _chunks(len(lengths)):
        numbers = np.arange(chunk.start, min(chunk.stop, len(lengths)))
        np.add.at(sums, np.searchsorted(starts, numbers, side="right") - 1, lengths[chunk])
    return sums


def _labels_ok(rows: Rows, labels: LabelSpace) -> bool:
    return bool(rows["label"].min() >= UNLABELLED and rows["label"].max() < len(labels))


def _keys_ok(rows: Rows) -> bool:
    """Whether each key is UTF-8; most are ASCII, which is quick to check."""
    keys = rows.view(np.uint8).reshape(len(rows), -1)[:, : rows.dtype["key"].itemsize]
    others = (keys >= 0x80).any(axis=1)
    try:
        b"\0".join(rows["key"][others].tolist()).decode()
    except UnicodeDecodeError:
        return False
    return True
