"""The tables of a folder of images, read whole once: their images, labels and columns."""

from __future__ import annotations

import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

from shardprep.formats.columns.schema import Field
from shardprep.formats.errors import SourceIncomplete
from shardprep.formats.records.labels import LabelSpace
from shardprep.formats.sources.image_columns.tables.cell_kinds import CellKind, cell_kinds
from shardprep.formats.sources.image_columns.tables.table_form import MAX_ROW_BYTES, TableForm, TableRow
from shardprep.formats.sources.labelled_list.file_status import FileStatus, place_below
from shardprep.formats.sources.labelled_list.lines import Lines
from shardprep.formats.sources.listing.entry_table import EntryTable, record_key
from shardprep.formats.sources.listing.problems import Problems
from shardprep.formats.sources.listing.source import Entries
from shardprep.formats.sources.listing.source_options import SourceOptions
from shardprep.formats.sources.listing.tree_files import mtime_of
from shardprep.formats.sources.listing.unlisted import add_unlisted
from shardprep.formats.system.foreign_file import foreign_file
from shardprep.formats.system.regular_file import ArchiveFile, Identity

from .image_labels import ImageLabels
from .metadata_reader import ROW_COLUMNS

PATH_NAME = "file_name"
LABEL_NAMES = ("label", "class", "class_name", "wnid", "synset")


class ReadTable(NamedTuple):
    """A table: its file, its form, and the places in a row of the path, the label and the columns."""

    path: Path
    identity: Identity
    form: TableForm
    path_at: int
    label_at: int | None
    cells: tuple[int, ...]


class SplitImages:
    """The images of one split, as rows list them; ``place`` is the split's folder below the root."""

    def __init__(self, place: str, table: Path, problems: Problems) -> None:
        self.place = place
        self.entries: Entries | None = None
        self._table = EntryTable(table, problems, ROW_COLUMNS)
        self._lines = array("q")

    def append(self, path: str, label: int, row: TableRow, status: os.stat_result) -> None:
        """Add the image at ``path`` below the place."""
        taken = self._table.append(
            record_key(path.partition("/")[0], path),
            label,
            length=status.st_size + row.length,
            path=f"{self.place}/{path}".lstrip("/").encode(),
            offset=row.offset,
            mtime_ns=mtime_of(status),
            more=(status.st_size, row.length),
        )
        if taken:
            self._lines.append(row.line)

    def finish(self) -> Entries:
        """Return all images, and keep them as ``entries``; repeated ones are added to the problems."""
        self.entries = self._table.finish(self._lines)
        return self.entries


class MetadataTables:
    """What the tables of a folder list, for each split in ``places``.

    ``problems`` are those of rows and images; ``fields`` and ``labels`` are the same for all splits.
    """

    def __init__(self, root: Path, tables: Mapping[str, Path], places: Mapping[str, str]) -> None:
        self.problems = Problems()
        self.tables: dict[Path, ReadTable] = {}
        self.images = {split: SplitImages(places[split], tables[split], self.problems) for split in places}
        self.ignored: dict[str, Counter[str]] = {}
        self.fields: tuple[Field, ...] = ()
        self.labels = LabelSpace.of(())
        self._root = root
        self._of_table = {path: [s for s in places if tables[s] == path] for path in tables.values()}
        self._kinds: dict[str, CellKind] = {}
        self._numbers = ImageLabels()

    def read(self, options: SourceOptions) -> None:
        """Read all tables; rows and images that cannot be used are added to the problems.

        Raises SourceDamaged, with the line, where the rows after it cannot be read, and UsageError for
        columns that are not there.
        """
        for path, splits in self._of_table.items():
            images = {split: self.images[split] for split in splits}
            with (
                ArchiveFile(path) as file,
                FileStatus(self._root, follow_symlinks=options.follow_symlinks) as files,
            ):
                with _at(path, lambda: 1):
                    table = self.tables[path] = self._table(file, options)
                self._read_rows(table, Lines(file, MAX_ROW_BYTES), images.values(), files)
        self.fields = tuple(kind.field for kind in self._kinds.values())
        self.labels, numbers = self._numbers.numbered()
        for split, one in self.images.items():
            entries = one.finish()
            entries["label"] = numbers[entries["label"]]
            self.ignored[split] = add_unlisted(
                self._root,
                one.place,
                entries["path"],
                self.problems,
                "has no row in the table; add one, or remove it",
                follow_symlinks=options.follow_symlinks,
            )

    def _table(self, file: ArchiveFile, options: SourceOptions) -> ReadTable:
        """Return the table in a file by its first line. Raises ValueError, UsageError."""
        form = TableForm.of(file)
        names = form.names
        path, label = options.path_column or PATH_NAME, _label_column(names, options)
        if path not in names:
            there = ", ".join(names)[:200]
            raise ValueError(
                f"has no column {path!r}; name that of the paths with --path-column, of: {there}"
            )
        kinds = cell_kinds(names, options.column_choices, [path, label or path], typed=not form.delimiter)
        of_header = {kind.header: kind for kind in kinds.values()}
        self._kinds = self._kinds or of_header
        if self._kinds.keys() != of_header.keys():
            raise ValueError("has other columns than the table of another split; give all the same")
        cells = tuple(names.index(header) for header in self._kinds)
        label_at = None if label is None else names.index(label)
        return ReadTable(file.path, file.identity, form, names.index(path), label_at, cells)

    def _read_rows(
        self, table: ReadTable, lines: Lines, images: Iterable[SplitImages], files: FileStatus
    ) -> None:
        of_place = {one.place: one for one in images}
        with _at(table.path, lambda: lines.number):
            for row in table.form.rows(lines):
                line = row.line if isinstance(row, TableRow) else lines.number
                with self.problems.collected("row"), _at(table.path, lambda line=line: line):  # type: ignore[misc]
                    self._add(table, row, of_place, files)

    def _add(
        self,
        table: ReadTable,
        row: TableRow | ValueError,
        images: Mapping[str, SplitImages],
        files: FileStatus,
    ) -> None:
        if isinstance(row, ValueError):
            raise row
        place = self._place(table, row)
        split, _, path = ("", "", place) if "" in images else place.partition("/")
        if split not in images or not path:
            raise ValueError(f"{place[:200]!r} lies in no folder of a split: {', '.join(images)}")
        with self.problems.collected("missing"):
            status = files.of(place)
            if status is None:
                missing = f"line {row.line}: {place} is missing; add it, or remove the row"
                raise SourceIncomplete(missing, path=table.path)
            images[split].append(path, self._label(table, row, path), row, status)
            for at, kind in zip(table.cells, self._kinds.values(), strict=True):
                kind.add(row.cells[at])

    def _place(self, table: ReadTable, row: TableRow) -> str:
        """Return the path of a row's image below the root. Raises ValueError."""
        given = row.cells[table.path_at]
        if not isinstance(given, str) or given.startswith("/"):
            raise ValueError(f"names no file beside the table: {str(given)[:200]!r}")
        folder = table.path.parent.relative_to(self._root).as_posix()
        return place_below(f"{folder}/{given}", [self._root])

    def _label(self, table: ReadTable, row: TableRow, path: str) -> int:
        if table.label_at is None:
            return self._numbers.of_folder(path)
        return self._numbers.of_cell(row.cells[table.label_at])


def _label_column(names: tuple[str, ...], options: SourceOptions) -> str | None:
    """Return the name of the column of labels, None without one. Raises ValueError if it is missing."""
    if options.label_column is None:
        return next((name for name in LABEL_NAMES if name in names), None)
    if options.label_column not in names:
        raise ValueError(f"has no column {options.label_column!r}; its columns are: {', '.join(names)[:200]}")
    return options.label_column


def _at(path: Path, line: Callable[[], int]) -> AbstractContextManager[None]:
    return foreign_file(path, "correct the table", place=lambda: f"line {line()}: ")
