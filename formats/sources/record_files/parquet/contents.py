"""The contents of a split's Parquet files: labels, paths, and the sizes of the images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardprep.formats.columns.schema import Schema
from shardprep.formats.errors import SourceDamaged
from shardprep.formats.records.labels import UNLABELLED
from shardprep.formats.sources.listing.entry_table import official_key
from shardprep.formats.sources.listing.problems import Problems
from shardprep.formats.sources.listing.tree_files import wrapped
from shardprep.formats.sources.record_files.classes import NumberedClasses
from shardprep.formats.sources.record_files.record_table import RecordTable
from shardprep.formats.sources.record_files.split_files import SplitFiles
from shardprep.formats.system.foreign_file import foreign_file
from shardprep.formats.system.regular_file import ArchiveFile

from .layout import ParquetLayout
from .library import arrow_reads, opened, read_group


class RowContents:
    """The rows so far, with the sizes of their images."""

    def __init__(self, files: SplitFiles, layout: ParquetLayout) -> None:
        self.problems = Problems()
        self.table = RecordTable(files.top, self.problems)
        self.classes = NumberedClasses()
        self._files = files
        self._layout = layout

    def add_names(self) -> None:
        """Add the names of the classes. Raises ValueError for what can be none."""
        for label, name in enumerate(self._layout.classes):
            self.classes.add(label, name)

    def schema(self) -> Schema:
        """Return the columns beside image and label."""
        return Schema(self._layout.fields.values())

    def read(self, name: str) -> None:
        """Read labels and paths of a file, and the sizes of its images. Raises SourceDamaged."""
        path = self._files.top / name
        with ArchiveFile(path) as archive, arrow_reads(path), opened(path) as file:
            first = 0
            mtime_ns = wrapped(archive.identity.mtime_ns)
            for group in range(file.metadata.num_row_groups):
                first = self._add_group(file, group, name, first, mtime_ns)

    def _add_group(self, file: Any, group: int, name: str, first: int, mtime_ns: int) -> int:
        """Add the rows of a group; return the number of the row after them."""
        metadata = file.metadata.row_group(group)
        columns = [column for column in (self._layout.image, self._layout.label) if column]
        table = read_group(file, group, columns)
        rows = table.num_rows
        labels, (sizes, paths) = self._labels(table), _images(table, self._layout)
        others = max(0, metadata.total_byte_size - sum(size or 0 for size in sizes)) // max(1, rows)
        for row, (label, size, path) in enumerate(zip(labels, sizes, paths, strict=True), first):
            place = f"{self._files.top / name}, row {row}"
            with self.problems.collected("row"), foreign_file(place, "write the file again"):
                if size is None:
                    raise ValueError(f"has no bytes of the image, only its path {path!r}: embed the images")
                self.table.append(
                    _name(path),
                    self._label(label),
                    length=size + others,
                    path=name,
                    offset=row,
                    mtime_ns=mtime_ns,
                )
        return first + int(rows)

    def _labels(self, table: Any) -> Sequence[int | None]:
        label = self._layout.label
        labels: list[int | None] = table.column(label).to_pylist() if label else [None] * table.num_rows
        return labels

    def _label(self, label: int | None) -> int:
        if label is None:
            return UNLABELLED
        if self._layout.classes and label >= len(self._layout.classes):
            raise ValueError(f"has the label {label} of {len(self._layout.classes)} classes")
        return self.classes.add(label)


def _images(table: Any, layout: ParquetLayout) -> tuple[list[int | None], list[str | None]]:
    """Return the size of each image, None without bytes, and its path, None for none."""
    import pyarrow.compute  # optional, and slow to import

    none: list[str | None] = [None] * table.num_rows
    if not layout.image:
        return [0] * table.num_rows, none
    images = table.column(layout.image)
    paths = none
    if layout.in_struct:
        paths = pyarrow.compute.struct_field(images, "path").to_pylist()
        images = pyarrow.compute.struct_field(images, "bytes")
    return pyarrow.compute.binary_length(images).to_pylist(), paths


def _name(path: str | None) -> str:
    """Return the name by which the row's key is chosen: that of an image of ILSVRC12 without extension."""
    stem = (path or "").rpartition(".")[0]
    return stem if official_key(stem.rpartition("/")[2]) else path or ""


def changed_schema(path: object, first: object) -> SourceDamaged:
    """Return the error for a file with other columns than the first one."""
    return SourceDamaged(f"has other columns than {first}; put them into two folders", path=str(path))
