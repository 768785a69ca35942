"""The manifest of a dataset and its index, with their validation.

``manifest.json`` describes a dataset, with the hashes of its files, and is published last. It is canonical
JSON: equal manifests have equal bytes, and any changed byte is detected, as invalid or non-canonical JSON or
as a mismatch with its own ``root``. The root determines every byte of the dataset: it is the string to pin.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import DatasetNotFound, ManifestDamaged, UnknownVersion, UsageError
from shardprep.formats.images.header import LATER_KINDS, ImageInfo
from shardprep.formats.records.record import (
    MAX_CLASS_ID,
    MAX_IMAGE_BYTES,
    MAX_KEY_BYTES,
    SPACES,
    UNLABELLED,
    LabelSpace,
)
from shardprep.formats.records.schema import MAX_VALUE_BYTES, Field, Schema
from shardprep.formats.runtime.files import read_small_file
from shardprep.formats.runtime.json_record import (
    FILE_SHAPE,
    SHA256,
    canonical_json,
    is_text,
    matches,
    parse_as,
    parse_canonical_json,
    parse_fields,
    sha256_of,
    to_json_value,
)
from shardprep.formats.runtime.owners import cached_property
from shardprep.formats.runtime.progress import check_flags, count_of
from shardprep.formats.runtime.user_paths import user_path
from shardprep.formats.shards.columns import (
    BOX_COLUMNS,
    BoxTable,
    ColumnEntry,
    ColumnTable,
    DatasetColumns,
    shard_name,
    table_name,
)
from shardprep.formats.shards.read import (
    ALL_CONTAINERS,
    ARCHIVE_NAME,
    IN_PLACE,
    MANIFEST_NAME,
    MAX_ARCHIVE_BYTES,
    FileEntry,
    IndexedArchive,
    Rows,
    StoredRecord,
    read_table,
)

ROOT = re.compile(r"blake3:[0-9a-f]{64}")

_COLUMN = {"name": str, "kind": str, "table": FILE_SHAPE, "shards": [FILE_SHAPE], "content_root": ROOT}
_CLASS = {
    "name": is_text,
    "words": lambda words: words is None or is_text(words),
    "ilsvrc2012_id": lambda number: number is None or (type(number) is int and 0 <= number <= MAX_CLASS_ID),
}


def _are_valid_columns(value: object) -> bool:
    """Whether the value is a valid "columns" part, with a schema known to this release."""
    if not matches(value, {"fields": [_is_valid_column], "records_root": ROOT, "has_images": bool}):
        return False
    try:
        schema = Schema(Field.from_json(each) for each in value["fields"])  # type: ignore[index]
    except UsageError:
        return False
    return len(schema) > 0


def _is_valid_column(value: object) -> bool:
    return matches(value, _COLUMN) or matches(value, _COLUMN | {"classes": lambda c: c and matches(c, [str])})


def _is_valid_archive(value: Any) -> bool:
    shape = {"name": is_text, "block_bytes": _is_count, "regions": [{"size": int, "sha256": SHA256}]}
    return matches(value, shape) and sum(each["size"] for each in value["regions"]) <= MAX_ARCHIVE_BYTES


def _are_valid_labels(value: Any) -> bool:
    """Whether the classes are unique and in order, so that a label determines its class."""
    if not matches(value, {"space": re.compile(SPACES[0]), "classes": [_CLASS], "sha256": str}):
        return False
    return all(before["name"] < after["name"] for before, after in pairwise(value["classes"]))


def _are_valid_kinds(value: Any) -> bool:
    return matches(value, list) and value != [] and value == [kind for kind in LATER_KINDS if kind in value]


def _is_count(value: object) -> bool:
    return matches(value, int) and value != 0


def _dict_with(kinds: dict[str, type]) -> Callable[[Any], bool]:
    """Return the shape of a dict with at least these keys, with values of these types."""
    return lambda value: (
        isinstance(value, dict) and all(type(value.get(name)) is kind for name, kind in kinds.items())
    )


_DATASET = {"split": str, "partial": bool, "class_sorted": bool}
_DATASET |= {"records": int, "image_bytes": int, "skipped": int}
PLAN = {"container": str, "shard_size": int, "order": str, "seed": int, "sha256": str, "on_bad_image": str}
PLAN |= {"decode_check": bool}

PART_SHAPES: dict[str, Any] = {
    "dataset": _DATASET,
    "labels": _are_valid_labels,
    "source": _dict_with({"layout": str}),
    "plan": _dict_with(PLAN),
    "writer": dict,
    "container": re.compile("|".join(ALL_CONTAINERS)),
    "kinds": _are_valid_kinds,
    "crop_ready": _is_count,
    "columns": _are_valid_columns,
    "archive": _is_valid_archive,
    "offsets": lambda part: part is True,
    "content_root": str,
    "tables": [FILE_SHAPE],
    "shards": [FILE_SHAPE],
}
"""The shape of each part of a manifest; critical parts are optional."""

_FIELDS = ("source", "plan", "container", "writer", "content_root", "tables", "shards")  # as in the Manifest
KNOWN_KEYS = frozenset(["format", "version", "crit", "root", *PART_SHAPES])
CRITICAL_KEYS = ("kinds", "crop_ready", "columns", "archive", "offsets")


def _columns_fit(value: dict[str, Any]) -> bool:
    """Whether the columns of a manifest agree with its other parts."""
    columns, dataset = parse_as(DatasetColumns, value["columns"]), value["dataset"]
    for entry in columns.fields:
        name, shards = entry.field.name, [] if entry.field.is_fixed else value["shards"]
        files = [(table_name(name), dataset["records"])]
        for number, shard in enumerate(shards):
            files.append((shard_name(name, number, value["container"]), shard["records"]))
        if [(file.name, file.records) for file in entry.files] != files:
            return False
    has_images = columns.has_images or not dataset["image_bytes"]
    return has_images and columns.content_root == value["content_root"]


def find_issue(value: dict[str, Any]) -> str:
    """Return what is wrong with a manifest of a known version, or ""."""
    wrong = [
        name
        for name, shape in PART_SHAPES.items()
        if not matches(value.get(name), shape) and (name in value or name not in CRITICAL_KEYS)
    ]
    wrong += ["crit"] if value.get("crit") != [name for name in CRITICAL_KEYS if name in value] else []
    if wrong:
        return f"has invalid or missing parts: {', '.join(wrong)}"
    shards, records = value["shards"], value["dataset"]["records"]
    columns = value.get("columns", {"fields": []})["fields"]
    files = [*value["tables"], *shards]
    files += [file for column in columns for file in (column["table"], *column["shards"])]
    in_place = value["container"] == IN_PLACE
    contradictions = {
        "archive": ("archive" in value) is not in_place
        or (in_place and ("columns" in value or len(value["archive"]["regions"]) != len(shards))),
        "tables and shards": len({file["name"] for file in files}) != len(files),
        "records": not records or sum(shard["records"] for shard in shards) != records,
        "labels": sha256_of([c["name"] for c in value["labels"]["classes"]]) != value["labels"]["sha256"],
        "columns": "columns" in value and not _columns_fit(value),
    }
    wrong = [name for name, is_so in contradictions.items() if is_so]
    return f"has parts that contradict the others: {', '.join(wrong)}" if wrong else ""


FORMAT_VERSION = (1, 1)

PROVENANCE_NAME = "provenance.json"
QUARANTINE_NAME = "quarantine.json"
COLLECTION_NAME = "collection.json"  # instead of a manifest, lists datasets in other folders
FORMAT_NAME = "shardprep"
MAX_MANIFEST_BYTES = 64 << 20

JOINED = "joined"  # in ``source``: a list with an object for each joined column, with its name


@dataclass(frozen=True)
class Manifest:
    """The manifest of a dataset, validated by :meth:`parse`; the constructor checks nothing.

    Attributes:
        split: "train", "val" or "test".
        records: Number of records.
        image_bytes: Total size of the images.
        partial: Whether the source had fewer or more images than expected.
        class_sorted: Whether the records are stored class by class.
        skipped: Number of bad images left out.
        labels: The label space.
        source: Layout and archives, as the conversion wrote them.
        plan: Options and SHA-256 of the plan, as the conversion wrote them.
        container: "lmdb", "hdf5" or, with an ``archive``, "tar".
        writer: Versions of the libraries that wrote the shards.
        tables: Entries of the index and, if there are any, of the boxes and the quarantine list.
        shards: Entries of the shards, in stored order.
        content_root: Hash over the records, and the columns if there are any.
        version: The format's (major, minor).
        extra: Keys of a later minor version that this release does not need.
        kinds: Kinds of image files other than JPEG and PNG, by name, in the order of
            :data:`~shardprep.formats.images.header.KINDS`.
        crop_ready: Number of images with a table of their segments.
        columns: The columns besides key, label and image, or None.
        archive: The archive that contains the images; None if the shards do.
        offsets: Whether the index and the column tables have the offset of each image and value in its file;
            in format 1.0, only the containers have it.
    """

    split: str
    records: int
    image_bytes: int
    partial: bool
    class_sorted: bool
    skipped: int
    labels: LabelSpace
    source: dict[str, Any]
    plan: dict[str, Any]
    container: str
    writer: dict[str, Any]
    tables: tuple[FileEntry, ...]
    shards: tuple[FileEntry, ...]
    content_root: str
    version: tuple[int, int] = FORMAT_VERSION
    extra: dict[str, Any] = field(default_factory=dict)
    kinds: tuple[str, ...] = ()
    crop_ready: int = 0
    columns: DatasetColumns | None = None
    archive: IndexedArchive | None = None
    offsets: bool = True

    @cached_property
    def root(self) -> str:
        """The SHA-256 over the rest of the manifest: pin this string."""
        return sha256_of(self._body())

    def __repr__(self) -> str:
        size = f"{count_of(self.records, 'record')}, {count_of(len(self.labels), 'class')}, {count_of(len(self.shards), f'{self.container} shard')}"
        return f"<Manifest: {self.split}, {size}>"

    def table(self, name: str) -> FileEntry | None:
        """Return the table with that file name, or None."""
        return next((t for t in self.tables if t.name == name), None)

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """All files that the manifest lists."""
        return (*self.tables, *self.shards, *self.column_files)

    @property
    def column_entries(self) -> tuple[ColumnEntry, ...]:
        return self.columns.fields if self.columns else ()

    @property
    def column_files(self) -> tuple[FileEntry, ...]:
        return tuple(file for entry in self.column_entries for file in entry.files)

    def source_objects(self, name: str) -> list[dict[str, Any]]:
        """Return the objects of a list in ``source``; empty if it has no such list."""
        values = self.source.get(name)
        return [each for each in values if isinstance(each, dict)] if isinstance(values, list) else []

    @property
    def joined(self) -> tuple[str, ...]:
        """The names of joined columns, whose values are not in the source of the conversion."""
        names = [column.get("name") for column in self.source_objects(JOINED)]
        return tuple(name for name in names if isinstance(name, str) and name in self.schema)

    @property
    def archive_md5(self) -> dict[str, str]:
        """The official MD5s that the source's archives were checked against, by archive name."""
        archives = self.source_objects("archives")
        return {str(each.get("name")): md5 for each in archives if isinstance(md5 := each.get("md5"), str)}

    @property
    def schema(self) -> Schema:
        return self.columns.schema if self.columns else Schema()

    @property
    def has_images(self) -> bool:
        """Whether the records have images; otherwise, all images are empty."""
        return self.columns is None or self.columns.has_images

    @property
    def records_root(self) -> str:
        """The hash over keys, labels and images alone; equal to ``content_root`` without columns."""
        return self.columns.records_root if self.columns else self.content_root

    @property
    def image_files(self) -> tuple[str, ...]:
        """The names of the files that hold the images."""
        return (ARCHIVE_NAME,) if self.archive else tuple(shard.name for shard in self.shards)

    @property
    def size(self) -> int:
        """The total size of all files that the manifest lists, and of the archive."""
        return sum(file.size for file in self.files) + (self.archive.size if self.archive else 0)

    @property
    def image_room(self) -> tuple[int, ...]:
        """The size of each shard, or of its region of the archive."""
        return tuple(each.size for each in (self.archive.regions if self.archive else self.shards))

    def _body(self) -> dict[str, Any]:
        critical = {name: to_json_value(part) for name in CRITICAL_KEYS if (part := getattr(self, name))}
        own = {
            "format": FORMAT_NAME,
            "version": list(self.version),
            "crit": list(critical),
            "dataset": {name: getattr(self, name) for name in _DATASET},
            "labels": {"space": SPACES[0], "classes": self.labels.to_json(), "sha256": self.labels.digest},
        }
        return self.extra | critical | own | {name: to_json_value(getattr(self, name)) for name in _FIELDS}

    def bytes_of(self, names: Iterable[str]) -> int:
        """Return the total size of these files."""
        sizes = {file.name: file.size for file in self.files}
        return sum(sizes[name] for name in names)

    def to_bytes(self) -> bytes:
        """Return the file's bytes; ``Manifest.parse(m.to_bytes()) == m``."""
        return canonical_json(self._body() | {"root": self.root})

    @classmethod
    def parse(cls, data: bytes, path: Path | None = None) -> Manifest:
        """Validate ``data``, the bytes of ``path``, and return the manifest.

        ``Manifest.parse(data).to_bytes() == data``, because it accepts only what it keeps. Takes up to 8
        times the memory of ``data`` for lists of shards and classes, and at most 0.7 GB for any other data.
        Raises ManifestDamaged, UnknownVersion.
        """
        try:
            value = parse_canonical_json(data)
        except ValueError as error:
            raise ManifestDamaged(f"{error}", path=path) from error
        _check_version(value, path)
        if issue := find_issue(value):
            raise ManifestDamaged(issue, path=path)
        parts = {name: value[name] for name in (*_FIELDS, *CRITICAL_KEYS) if name in value}
        parts |= value["dataset"] | {"labels": value["labels"]["classes"], "offsets": "offsets" in value}
        parts["extra"] = {name: part for name, part in value.items() if name not in KNOWN_KEYS}
        return cls(**parse_fields(cls, parts), version=(value["version"][0], value["version"][1]))


def read_manifest(dataset: str | os.PathLike[str]) -> Manifest:
    """Return the manifest of the folder ``dataset``.

    Raises DatasetNotFound, ManifestDamaged, UnknownVersion, OSError, and UsageError for a collection.
    """
    folder = user_path(dataset)
    path = folder / MANIFEST_NAME
    try:
        data = read_small_file(path, MAX_MANIFEST_BYTES, ManifestDamaged)
    except (FileNotFoundError, NotADirectoryError) as error:
        if os.path.lexists(folder / COLLECTION_NAME):
            raise UsageError(
                "is a collection; give its parts, one at a time; in Python, open_collection() reads it",
                path=folder,
            ) from error
        if not folder.is_dir():
            raise DatasetNotFound.at(folder) from error
        message = (
            "no manifest.json: not a dataset, or an unfinished one; finish it with prep convert or prep fetch"
        )
        raise ManifestDamaged(message, path=folder) from error
    return Manifest.parse(data, path)


def _check_version(value: object, path: Path | None) -> None:
    """Refuse an unknown major version, critical key or image kind, before any other check."""
    if not isinstance(value, dict) or value.get("format") != FORMAT_NAME:
        raise ManifestDamaged("is not a shardprep manifest", path=path)
    version, critical = value.get("version"), value.get("crit")
    if not (isinstance(version, list) and len(version) == 2 and all(type(v) is int for v in version)):
        raise ManifestDamaged(f"has the version {version!r}", path=path)
    if not isinstance(critical, list):
        raise ManifestDamaged("crit is not a list", path=path)
    if sha256_of({name: part for name, part in value.items() if name != "root"}) != value.get("root"):
        raise ManifestDamaged("does not match its own root: it was changed after it was published", path=path)
    kinds: Any = value.get("kinds") if "kinds" in critical else ()
    unknown = [name for name in critical if name not in CRITICAL_KEYS]
    if matches(kinds, [str]):
        unknown += [kind for kind in kinds if kind not in LATER_KINDS]
    if version[0] != FORMAT_VERSION[0] or unknown:
        known = ".".join(map(str, FORMAT_VERSION))
        own = ".".join(map(str, version)) + (f" with {unknown}" if unknown else "")
        raise UnknownVersion(f"format version {own}; this release knows {known}", path=path)


Numbers = npt.NDArray[np.int64]

INDEX_NAME = "index.npy"
BOXES_NAME = "boxes.npy"


def index_dtype(key_bytes: int, *, offsets: bool = True) -> np.dtype[np.void]:
    """Return the row dtype of the index.

    ``shard`` and ``ordinal`` are the record's place; ``length`` is the image's size in bytes, and ``offset``
    its start in the shard file or archive; ``width``, ``height`` (pixels, EXIF not applied), ``components``,
    ``orientation`` and ``flags`` (an :class:`~shardprep.formats.images.header.ImageFlag`) describe it. Format
    1.0 has no ``offsets``.
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


def tables_of(manifest: Manifest) -> list[FileEntry]:
    """Return the entries of the tables of a dataset and its columns."""
    return [*manifest.tables, *(column.table for column in manifest.column_entries)]


def add_offsets(rows: Rows) -> Rows:
    """Return index rows with a column ``offset``, which is 0 for format 1.0."""
    if "offset" in (rows.dtype.names or ()):
        return rows
    widened = np.zeros(len(rows), index_dtype(rows.dtype["key"].itemsize))
    widened[list(rows.dtype.names or ())] = rows
    widened.flags.writeable = False
    return widened


def kinds_in(flags: npt.NDArray[np.uint16]) -> tuple[str, ...]:
    """Return the names, in order, of the image kinds other than JPEG and PNG in the column ``flags``."""
    present = int(np.bitwise_or.reduce(flags, initial=0))
    return tuple(name for name, flag in LATER_KINDS.items() if present & flag)


def index_dtype_of_width(width: int, *, offsets: bool) -> np.dtype[np.void] | None:
    """Return the dtype of an index row of ``width`` bytes, or None if there is none."""
    key_bytes = width - index_dtype(1, offsets=offsets).itemsize + 1
    return index_dtype(key_bytes, offsets=offsets) if 1 <= key_bytes <= MAX_KEY_BYTES else None


def index_row(stored: StoredRecord, info: ImageInfo, shard: int, ordinal: int) -> tuple[object, ...]:
    record = stored.key, stored.label, shard, ordinal, len(stored.image), stored.crc32c
    return (*record, info.width, info.height, info.flags, info.components, info.orientation, stored.offset)


def read_index(dataset: Path, manifest: Manifest, *, verify: bool = True) -> Rows:
    """Read the index of a dataset folder into memory, and check it against the manifest.

    The rows must be the shards' records in order, labels in the label space, keys UTF-8, and lengths valid
    for images, within the shards, and consistent with the total. Only reading the records shows whether the
    rows match them. The column ``offset`` is 0 for format 1.0. Without ``verify``, a file with a
    :class:`.Seal` is not hashed. Raises ManifestDamaged, OSError.
    """
    check_flags(verify=verify)
    entry, path = manifest.table(INDEX_NAME), dataset / INDEX_NAME
    if entry is None:
        raise ManifestDamaged(f"lists no {INDEX_NAME}", path=dataset)
    row_of = partial(index_dtype_of_width, offsets=manifest.offsets)
    rows = add_offsets(read_table(path, entry, row_of, seal=None if verify else manifest.root))
    if len(rows) != manifest.records:
        raise ManifestDamaged(f"has {len(rows):,} rows, not {manifest.records:,}", path=path)
    if not _index_fits(rows, manifest):
        raise _misfit_error(path)
    return rows


def read_box_rows(dataset: Path, manifest: Manifest) -> Rows | None:
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


def check_column(dataset: Path, manifest: Manifest, entry: ColumnEntry) -> Rows | None:
    """Check a column's table: only the header for fixed-size values, else the lengths, which are returned.

    Lengths must be valid for values, and within the shards. Raises ManifestDamaged, OSError.
    """
    path = dataset / entry.table.name
    if entry.field.is_fixed:
        ColumnTable(path, entry).close()
        return None
    rows = read_table(path, entry.table, entry.row)
    sizes = [shard.size for shard in entry.shards]
    sums = _sum_lengths(rows, manifest, sizes, MAX_VALUE_BYTES)
    if sums is None or (sums > sizes).any():
        raise _misfit_error(path)
    return rows


def _misfit_error(path: Path) -> ManifestDamaged:
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
        are_in_place = ((chunk["shard"] == shards) & (chunk["ordinal"] == ordinals)).all()
        if not are_in_place or not _are_keys_utf8(chunk):
            return False
    if rows["label"].min() < UNLABELLED or rows["label"].max() >= len(manifest.labels):
        return False
    archive = manifest.archive
    sizes = [archive.size if archive else shard.size for shard in manifest.shards]
    sums = _sum_lengths(rows, manifest, sizes, MAX_IMAGE_BYTES)
    return (
        sums is not None
        and sums.sum() == manifest.image_bytes
        and not (sums > list(manifest.image_room)).any()
    )


def _sum_lengths(rows: Rows, manifest: Manifest, sizes: Sequence[int], most: int) -> Numbers | None:
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


def _are_keys_utf8(rows: Rows) -> bool:
    """Whether all keys are UTF-8; only those that are not ASCII are decoded."""
    keys = rows.view(np.uint8).reshape(len(rows), -1)[:, : rows.dtype["key"].itemsize]
    others = (keys >= 0x80).any(axis=1)
    try:
        b"\0".join(rows["key"][others].tolist()).decode()
    except UnicodeDecodeError:
        return False
    return True
