"""A finished shard, and the images that were left out of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from shardprep.formats.containers.published_file import FileEntry

from .column_of_shard import BuiltColumn


@dataclass(frozen=True, slots=True)
class SkippedImage:
    """A bad image that was left out on request: its key, its place in the source, and what is wrong."""

    key: str
    where: str
    reason: str


@dataclass(frozen=True)
class BuiltShard:
    """A finished shard, as in its commit record."""

    plan: str
    name: str
    size: int
    sha256: str
    records: int
    image_bytes: int
    rows_sha256: str
    skipped: tuple[SkippedImage, ...] = ()
    columns: tuple[BuiltColumn, ...] = ()
    region_sha256: str = ""

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """The shard's file, and those of its columns."""
        shard = FileEntry(self.name, self.size, self.sha256, self.records)
        return (shard, *(column.shard for column in self.columns if column.shard))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> BuiltShard:
        """Return the shard of a commit record; the inverse of ``to_json``."""
        skipped = tuple(SkippedImage(**s) for s in value["skipped"])
        columns = tuple(BuiltColumn(**c) for c in value["columns"])
        return cls(**{**value, "skipped": skipped, "columns": columns})
