"""The manifest: the description of a dataset, with the hashes of its files. Published last.

``manifest.json`` is canonical JSON, so equal manifests have equal bytes, and any changed byte is
found: the file is not JSON, or not canonical, or does not match its own ``root``. The root determines
every byte of the dataset, so it is the one string to pin.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from shardprep.formats.columns.column_entry import DatasetColumns
from shardprep.formats.columns.schema import Schema
from shardprep.formats.containers.archive import ARCHIVE_NAME, IndexedArchive
from shardprep.formats.containers.published_file import FileEntry, read_small
from shardprep.formats.errors import ManifestDamaged, UnknownVersion, UsageError
from shardprep.formats.records.canonical_json import canonical_json, parse_canonical_json, sha256_of
from shardprep.formats.records.labels import LabelSpace
from shardprep.formats.system.user_path import user_path

from .manifest_shape.manifest_checks import issues_of, unknown_parts

FORMAT_VERSION = (1, 0)


MANIFEST_NAME = "manifest.json"
PROVENANCE_NAME = "provenance.json"
QUARANTINE_NAME = "quarantine.json"
COLLECTION_NAME = "collection.json"  # lists datasets that lie elsewhere, in place of a manifest
FORMAT_NAME = "shardprep"
MAX_MANIFEST_BYTES = 64 << 20

KNOWN_KEYS = frozenset(
    [
        "format",
        "version",
        "crit",
        "kinds",
        "crop_ready",
        "archive",
        "columns",
        "dataset",
        "labels",
        "source",
        "plan",
        "container",
        "writer",
        "tables",
        "shards",
        "content_root",
        "root",
    ]
)


WORK_FOLDER_NAME = ".prep"
JOINED = "joined"  # in the source: a list of an object for each joined column, with its name


@dataclass(frozen=True)
class Manifest:
    """The manifest of a dataset, validated by :meth:`parse`; the constructor checks nothing.

    ``split`` is "train", "val" or "test"; ``records`` the number of records; ``image_bytes`` the sum of the
    images' lengths; ``partial`` whether the source had another number of images than it should;
    ``split`` is "train", "val" or "test"; ``records`` the number of records; ``image_bytes`` the sum of the
    images' lengths; ``partial`` whether the source had another number of images than it should;
    ``class_sorted`` whether the records are stored class after class; ``skipped`` the number of bad images
    left out; ``labels`` the :class:`LabelSpace`. ``source`` (layout and archives), ``plan`` (the options
    and the SHA-256 of the plan) and ``writer`` (versions of the libraries) are as the conversion wrote them.
    ``container`` is "lmdb", "hdf5" or, with an ``archive``, "tar". ``tables`` are the entries of the index
    and, if there are any, of the boxes and the quarantine list; ``shards`` those of the shards, in stored
    order. ``content_root`` is the hash over the records, ``version`` the format's (major, minor), and
    ``extra`` the keys of a later minor version that this release does not need. ``kinds`` are the kinds of
    image files other than JPEG and PNG, by their names and in the order of
    :data:`~shardprep.formats.images.kinds.image_info.KINDS`. ``crop_ready`` is the number of images with a
    table of their segments. ``columns`` are those beside key, label and image, None without any; with them,
    ``content_root`` covers the columns, too. ``archive`` is the archive that the images are in, None where
    shards hold them.
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

    @cached_property
    def root(self) -> str:
        """The SHA-256 over everything else in the manifest: the string to pin."""
        return sha256_of(self._body())

    def __repr__(self) -> str:
        size = f"{self.records:,} records, {len(self.labels):,} classes, {len(self.shards):,} {self.container} shards"
        return f"<Manifest: {self.split}, {size}>"

    def table(self, name: str) -> FileEntry | None:
        """Return the table of that file name, None if there is none."""
        return next((t for t in self.tables if t.name == name), None)

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """All files that the manifest lists, with their hashes."""
        return (*self.tables, *self.shards, *self.column_files)

    @property
    def column_files(self) -> tuple[FileEntry, ...]:
        """The files of the columns."""
        return tuple(self.columns.files) if self.columns else ()

    @property
    def joined(self) -> tuple[str, ...]:
        """The names of the columns that were joined: the source of the conversion has not their values."""
        found = self.source.get(JOINED)
        names = [one.get("name") for one in found if isinstance(one, dict)] if isinstance(found, list) else []
        return tuple(name for name in names if isinstance(name, str) and name in self.schema)

    @property
    def schema(self) -> Schema:
        """The columns' names and kinds."""
        return self.columns.schema if self.columns else Schema()

    @property
    def has_images(self) -> bool:
        """Whether the records have images; else these are empty."""
        return self.columns is None or self.columns.has_images

    @property
    def records_root(self) -> str:
        """The hash over keys, labels and images alone; equal to ``content_root`` without columns."""
        return self.columns.records_root if self.columns else self.content_root

    @property
    def image_files(self) -> tuple[str, ...]:
        """The names of the files in the dataset's folder that hold the images."""
        return (ARCHIVE_NAME,) if self.archive else tuple(shard.name for shard in self.shards)

    @property
    def size(self) -> int:
        """The bytes of all files that the manifest lists, and of the archive."""
        return sum(file.size for file in self.files) + (self.archive.size if self.archive else 0)

    @property
    def image_room(self) -> tuple[int, ...]:
        """The bytes in which the images of each shard lie."""
        return self.archive.sizes if self.archive else tuple(shard.size for shard in self.shards)

    def _body(self) -> dict[str, Any]:
        critical: dict[str, Any] = {"kinds": list(self.kinds)} if self.kinds else {}
        critical |= {"crop_ready": self.crop_ready} if self.crop_ready else {}
        critical |= {"columns": self.columns.to_json()} if self.columns else {}
        critical |= {"archive": self.archive.to_json()} if self.archive else {}
        return (
            self.extra
            | critical
            | {
                "format": FORMAT_NAME,
                "version": list(self.version),
                "crit": list(critical),
                "dataset": {
                    "split": self.split,
                    "records": self.records,
                    "image_bytes": self.image_bytes,
                    "partial": self.partial,
                    "class_sorted": self.class_sorted,
                    "skipped": self.skipped,
                },
                "labels": {
                    "space": "sorted_wnid0",
                    "classes": self.labels.to_json(),
                    "sha256": self.labels.digest,
                },
                "source": self.source,
                "plan": self.plan,
                "container": self.container,
                "writer": self.writer,
                "tables": [t.to_json() for t in self.tables],
                "shards": [s.to_json() for s in self.shards],
                "content_root": self.content_root,
            }
        )

    def bytes_of(self, names: Iterable[str]) -> int:
        """Return the sum of the sizes of these files."""
        sizes = {file.name: file.size for file in self.files}
        return sum(sizes[name] for name in names)

    def to_bytes(self) -> bytes:
        """Return the file's bytes, such that ``Manifest.parse(m.to_bytes()) == m``."""
        return canonical_json(self._body() | {"root": self.root})

    @classmethod
    def parse(cls, data: bytes, path: Path | None = None) -> Manifest:
        """Validate ``data``, the bytes of ``path``, and return the manifest.

        ``Manifest.parse(data).to_bytes() == data``, because only what is kept is accepted. Takes up to 8
        times the memory of ``data`` for lists of shards and classes, and at most 0.7 GB for any other data.
        Raises ManifestDamaged with every finding, or UnknownVersion.
        """
        try:
            value = parse_canonical_json(data)
        except ValueError as error:
            raise ManifestDamaged(f"{error}", path=path) from error
        _check_version(value, path)
        issues = issues_of(value)
        if issues:
            raise ManifestDamaged("; ".join(issues), path=path)
        return cls._from_valid(value)

    @classmethod
    def _from_valid(cls, value: dict[str, Any]) -> Manifest:
        return cls(
            **value["dataset"],
            labels=LabelSpace.from_json(value["labels"]["classes"]),
            source=value["source"],
            plan=value["plan"],
            container=value["container"],
            writer=value["writer"],
            tables=tuple(FileEntry(**t) for t in value["tables"]),
            shards=tuple(FileEntry(**s) for s in value["shards"]),
            content_root=value["content_root"],
            version=(value["version"][0], value["version"][1]),
            extra={name: part for name, part in value.items() if name not in KNOWN_KEYS},
            kinds=tuple(value.get("kinds", ())),
            crop_ready=value.get("crop_ready", 0),
            archive=IndexedArchive.from_json(value["archive"]) if "archive" in value else None,
            columns=DatasetColumns.from_json(value["columns"]) if "columns" in value else None,
        )


def read_manifest(dataset: str | os.PathLike[str]) -> Manifest:
    """Return the manifest of the folder ``dataset``.

    Raises ManifestDamaged, UnknownVersion, OSError, and UsageError for a collection.
    """
    folder = user_path(dataset)
    path = folder / MANIFEST_NAME
    try:
        data = read_small(path, MAX_MANIFEST_BYTES)
    except FileNotFoundError as error:
        if os.path.lexists(folder / COLLECTION_NAME):
            raise UsageError("is a collection; give its parts, one by one", path=folder) from error
        message = "no manifest.json: not a dataset, or its conversion has not finished"
        if not folder.exists():
            message = "there is no such folder"
        raise ManifestDamaged(message, path=folder) from error
    return Manifest.parse(data, path)


def _check_version(value: object, path: Path | None) -> None:
    """Refuse an unknown major version, critical key or kind of image, before anything else is checked."""
    if not isinstance(value, dict) or value.get("format") != FORMAT_NAME:
        raise ManifestDamaged("is not a shardprep manifest", path=path)
    version, critical = value.get("version"), value.get("crit")
    if not (isinstance(version, list) and len(version) == 2 and all(type(v) is int for v in version)):
        raise ManifestDamaged(f"has the version {version!r}", path=path)
    if not isinstance(critical, list):
        raise ManifestDamaged("crit is not a list", path=path)
    if _root_of(value) != value.get("root"):
        raise ManifestDamaged("does not match its own root: it was changed after it was published", path=path)
    unknown = unknown_parts(critical, value.get("kinds"))
    if version[0] != FORMAT_VERSION[0] or unknown:
        known = ".".join(map(str, FORMAT_VERSION))
        found = ".".join(map(str, version)) + (f" with {unknown}" if unknown else "")
        raise UnknownVersion(f"format version {found}; this release knows {known}", path=path)


def _root_of(value: dict[str, Any]) -> str:
    return sha256_of({name: part for name, part in value.items() if name != "root"})
