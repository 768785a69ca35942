"""collection.json: the parts of a collection, under one root. Canonical JSON, read with bounds."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from shardprep.formats.containers.published_file import read_small
from shardprep.formats.dataset.manifest import COLLECTION_NAME, Manifest, read_manifest
from shardprep.formats.dataset.manifest_shape.column_checks import ROOT
from shardprep.formats.dataset.manifest_shape.json_shape import SHA256, has_exactly
from shardprep.formats.errors import DataError, ManifestDamaged, UnknownVersion
from shardprep.formats.records.canonical_json import canonical_json, parse_canonical_json, sha256_of

FORMAT_NAME = "shardprep collection"
VERSION = 1
MAX_COLLECTION_BYTES = 4 << 20
MAX_PARTS = 4096
MAX_TEXT = 4096  # characters of a name or a path: the longest path of Linux

_ENTRY = {"name": str, "path": str, "root": str, "content_root": str, "records": int, "bytes": int}


@dataclass(frozen=True)
class PartEntry:
    """A part as the file lists it: a finished dataset.

    ``path`` leads to its folder, from that of the collection unless it is absolute. ``bytes`` are those of
    its files, and of the archive that its images stay in.
    """

    name: str
    path: str
    root: str
    content_root: str
    records: int
    bytes: int

    @classmethod
    def of(cls, name: str, path: str, manifest: Manifest) -> PartEntry:
        """Return the entry of a dataset."""
        return cls(name, path, manifest.root, manifest.content_root, manifest.records, manifest.size)

    def manifest(self, collection: Path) -> Manifest:
        """Return the part's manifest. Raises DataError, with the part's name, if it is not the listed one."""
        folder = collection / self.path
        try:
            manifest = read_manifest(folder)
        except ManifestDamaged as error:
            raise ManifestDamaged(f"the part {self.name}: {error.message}", path=folder) from error
        if PartEntry.of(self.name, self.path, manifest) != self:
            raise DataError(
                f"the part {self.name} is not the dataset that was collected: its root is {manifest.root}, not "
                f"{self.root}; put that dataset there, or repeat prep collect in another folder",
                path=folder,
            )
        return manifest


@dataclass(frozen=True)
class CollectionFile:
    """The contents of collection.json: its parts in order."""

    parts: tuple[PartEntry, ...]

    @cached_property
    def root(self) -> str:
        """The SHA-256 over names, roots, content roots and record counts of the parts, in order.

        The parts' places do not count: a collection keeps its root where it is moved.
        """
        known = ("name", "root", "content_root", "records")
        return sha256_of([[getattr(part, each) for each in known] for part in self.parts])

    def to_bytes(self) -> bytes:
        """Return the file's bytes, such that ``CollectionFile.parse(c.to_bytes()) == c``."""
        parts = [asdict(part) for part in self.parts]
        return canonical_json({"format": FORMAT_NAME, "version": VERSION, "parts": parts, "root": self.root})

    @classmethod
    def parse(cls, data: bytes, path: Path | None = None) -> CollectionFile:
        """Validate ``data``, the bytes of ``path``. Raises ManifestDamaged, UnknownVersion."""
        try:
            value = parse_canonical_json(data)
        except ValueError as error:
            raise ManifestDamaged(f"{error}", path=path) from error
        if not isinstance(value, dict) or value.get("format") != FORMAT_NAME:
            raise ManifestDamaged("is not a collection of datasets", path=path)
        version = value.get("version")
        if type(version) is not int or version != VERSION:
            raise UnknownVersion(
                f"a collection of version {version!r}; this release knows {VERSION}", path=path
            )
        if issue := _issue_of(value):
            raise ManifestDamaged(issue, path=path)
        found = cls(tuple(PartEntry(**part) for part in value["parts"]))
        if found.root != value["root"]:
            raise ManifestDamaged("does not match its own root: it was changed after it was made", path=path)
        return found


def read_collection(folder: Path) -> CollectionFile:
    """Return the collection in a folder. Raises ManifestDamaged, UnknownVersion, OSError."""
    path = folder / COLLECTION_NAME
    return CollectionFile.parse(read_small(path, MAX_COLLECTION_BYTES), path)


def _issue_of(value: dict[str, Any]) -> str:
    if not has_exactly(value, {"format": str, "version": int, "parts": list, "root": str}):
        return "has other parts than a collection"
    parts = value["parts"]
    if not 0 < len(parts) <= MAX_PARTS:
        return f"has {len(parts)} parts; a collection has 1 to {MAX_PARTS}"
    if not all(map(_part_ok, parts)):
        return "has a part that is not complete"
    return "has two parts of one name" if len({part["name"] for part in parts}) != len(parts) else ""


def _part_ok(value: object) -> bool:
    if not has_exactly(value, _ENTRY) or not value["records"]:
        return False
    if not (_is_name(value["name"]) and _is_name(value["path"])):
        return False
    return bool(SHA256.fullmatch(value["root"]) and ROOT.fullmatch(value["content_root"]))


def _is_name(text: str) -> bool:
    """Whether a text can be a path: neither empty nor too long, with bytes in UTF-8 or of a file name."""
    if not text or len(text) > MAX_TEXT or "\0" in text:
        return False
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True
