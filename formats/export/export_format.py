"""The contract of a format that datasets are exported to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, ClassVar

from shardprep.formats.columns.schema import Field, Schema
from shardprep.formats.containers.published_file import FileEntry
from shardprep.formats.containers.table import Rows
from shardprep.formats.errors import UsageError
from shardprep.formats.records.labels import LabelSpace
from shardprep.formats.system.atomic_write import hash_file, publishing

from .export_record import ExportRecord


@dataclass(frozen=True)
class Exportable:
    """What is known of a dataset before its records are read.

    ``index`` has a row for each record. ``kinds`` are the kinds of its images, by name; ``has_labels`` is
    whether any record has a label, and ``has_boxes`` whether there is a table of boxes.
    """

    path: Path
    split: str
    labels: LabelSpace
    schema: Schema
    kinds: frozenset[str]
    has_images: bool
    has_labels: bool
    has_boxes: bool


@dataclass(frozen=True)
class Places:
    """Where a job writes: ``output``, ``work`` in it, of state, and ``run`` in that, of unfinished files."""

    output: Path
    work: Path
    run: Path


class ExportFormat(ABC):
    """One format, for one dataset. Picklable and small: it is a part of every job.

    The dataset is exported in units, which are built independently and in any order. Equal records give
    equal bytes. ``name`` is the format's, and ``writer`` names what else decides the bytes. The constructor
    raises UsageError, with the name of the column, for a dataset that the format cannot hold.
    """

    name: ClassVar[str]
    writer: str = "1"
    has_parts: bool = False
    """Whether units leave files in the work folder, of which :meth:`finish` makes others."""

    def __init__(self, source: Exportable, index: Rows) -> None:
        self.source = source

    @abstractmethod
    def unit_name(self, number: int, count: int) -> str:
        """Return the name of the unit of that number, of ``count``."""

    def names(self, rows: Rows) -> list[str]:
        """Return the names that the format has for records, given their rows of the index."""
        return [key.decode() for key in rows["key"].tolist()]

    @abstractmethod
    def bytes_beside(self) -> int:
        """Return about how many bytes a record takes beside those of its image and columns."""

    @abstractmethod
    def build(self, name: str, records: Iterable[ExportRecord], count: int, places: Places) -> FileEntry:
        """Write and publish the unit of that name, of ``count`` records.

        Raises UsageError for a value that the format cannot hold, and OSError.
        """

    @abstractmethod
    def is_intact(self, unit: FileEntry, names: Sequence[str], output: Path) -> bool:
        """Whether a published unit is what was built. Raises OSError."""

    def finish(self, units: Sequence[FileEntry], places: Places) -> list[FileEntry]:
        """Publish the files that are about all units, and return them."""
        return []


class ShardFormat(ExportFormat):
    """A format of which the units are files."""

    @abstractmethod
    def write(self, file: BinaryIO, records: Iterable[ExportRecord], count: int) -> None:
        """Write a file of these records, of which there are ``count``."""

    def build(self, name: str, records: Iterable[ExportRecord], count: int, places: Places) -> FileEntry:
        final = places.output / name
        with publishing(final, places.run) as file:
            self.write(file, records, count)
        return FileEntry(name, final.stat().st_size, hash_file(final), count)

    def is_intact(self, unit: FileEntry, names: Sequence[str], output: Path) -> bool:
        return is_file_intact(unit, output)


def is_file_intact(entry: FileEntry, folder: Path) -> bool:
    """Whether a file is there, with the size and SHA-256 of its entry. Raises OSError."""
    path = folder / entry.name
    try:
        if path.is_symlink() or path.stat().st_size != entry.size:
            return False
        return hash_file(path) == entry.sha256
    except FileNotFoundError:
        return False


def cannot_hold(
    name: str, field: Field, why: str, *, instead: str = "webdataset, parquet or mds"
) -> UsageError:
    """Return the error for a column that a format cannot hold."""
    return UsageError(
        f"the column {field.name} of kind {field.kind} cannot be exported to {name}: {why}; export to {instead}"
    )


def refuse_taken(name: str, field: Field, taken: Iterable[str]) -> None:
    """Raise UsageError for a column with the name of something else that the format has."""
    if field.name.lower() in taken:
        raise cannot_hold(name, field, "the format has something else of that name", instead="another format")
