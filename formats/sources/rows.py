"""Images that rows of tables list: their entries, labels and splits, and the reader of their columns."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import SourceDamaged, SourceIncomplete
from shardprep.formats.records.labels import UNLABELLED, LabelSpace
from shardprep.formats.records.schema import Field, Schema
from shardprep.formats.runtime.files import ArchiveFile, Identity, foreign_file
from shardprep.formats.sources.listing import EntryTable, record_key
from shardprep.formats.sources.source import ByteReader, Entries, Listing, Problems, SourceOptions
from shardprep.formats.sources.tables import (
    CellKind,
    FileStatus,
    ImagesAndFile,
    Lines,
    ListedClasses,
    TableForm,
    TableRow,
    encoded_cell,
    label_name,
    left_out_note,
)
from shardprep.formats.sources.tar import archive_of
from shardprep.formats.sources.trees import TreeReader, mtime_of

ROW_COLUMNS = (("image_length", "<i8"), ("row_length", "<i8"))
"""The columns of the entries beside those of every source; an entry's offset is that of its row."""


@dataclass(frozen=True)
class ListedTable:
    """A table that lists images: its form, and the places in a row of path, label, split and columns.

    ``left_out`` has the names of columns that are not taken, as far as the rows were read.
    """

    path: Path
    identity: Identity
    form: TableForm
    path_at: int = 0
    label_at: int | None = 1
    split_at: int | None = None
    cells: tuple[int, ...] = ()
    left_out: dict[str, None] = field(default_factory=dict)


class SplitImages:
    """The images of one split, as rows list them; ``place`` is the split's folder below the root.

    ``missing`` counts the rows whose file is not there, and ``ignored`` other files, by name.
    """

    entries: Entries

    def __init__(self, place: str, table: EntryTable) -> None:
        self.place = place
        self.table = table
        self.lines = array("q")
        self.missing = 0
        self.first_missing = ""
        self.ignored: Counter[str] = Counter()


class ListedImages(ABC):
    """The images below ``root`` that the rows of tables list, for each split.

    ``problems`` are those of rows and images, and ``kinds`` those of the columns, by their headers, the same
    in all tables. ``advice`` says what to do about a row that is wrong. Entries have the places of their rows
    if ``keeps_rows``. In a list each image has a label, and files may be missing.
    """

    advice: str
    is_list = False
    keeps_rows = True

    def __init__(self, root: Path, options: SourceOptions) -> None:
        self.root = root
        self.options = options
        self.problems = Problems()
        self.images: dict[str, SplitImages] = {}
        self.kinds: dict[str, CellKind] = {}
        self.fields: tuple[Field, ...] = ()
        self.space = LabelSpace.of(())
        self.labels = ImageLabels(needs_label=self.is_list)

    @abstractmethod
    def table_in(self, file: ArchiveFile) -> ListedTable:
        """Return the table in a file by its first line. Raises ValueError, UsageError."""

    @abstractmethod
    def place_of(self, table: ListedTable, row: TableRow) -> tuple[str, str, str]:
        """Return an image's split, and its path below the root and below the split's folder.

        Raises ValueError.
        """

    def is_left_out(self, one: SplitImages, place: str, status: os.stat_result) -> bool:
        """Whether a file is to be left out, which then was counted."""
        return False

    def split_images(self, split: str, table: Path, place: str = "") -> SplitImages:
        """Return the images of a split, which lie in the folder ``place``."""
        if split not in self.images:
            more = ROW_COLUMNS if self.keeps_rows else ()
            self.images[split] = SplitImages(place, EntryTable(table, self.problems, more))
        return self.images[split]

    def read_table(self, path: Path) -> ListedTable:
        """Read all rows of a table; what cannot be used is added to the problems.

        Raises SourceDamaged, with the line, where the rows after it cannot be read, and UsageError for
        columns that are not there.
        """
        files = FileStatus(self.root, follow_symlinks=self.options.follow_symlinks)
        with ArchiveFile(path) as file:
            with self.at(path, lambda: 1):
                table = self.table_in(file)
            lines = Lines(file, table.form.limit)
            with self.at(path, lambda: lines.number):
                for row in table.form.rows(lines):
                    if isinstance(row, ValueError):
                        with self.problems.collected("row"), self.at(path, lambda: lines.number):
                            raise row
                    else:
                        self._add(table, row, files)
        return table

    def at(self, path: Path, line: Callable[[], int]) -> AbstractContextManager[None]:
        """Return the context that makes errors name their line."""
        return foreign_file(path, self.advice, place=lambda: f"line {line()}: ")

    def _add(self, table: ListedTable, row: TableRow, files: FileStatus) -> None:
        """Add a row. Only in a list does a row count whose file is missing: its label and its cells."""
        if row.others:
            table.left_out.update(dict.fromkeys(row.others))
        found = label = None
        with self.problems.collected("path"), self.at(table.path, lambda: row.line):
            found = self.place_of(table, row)
        if found is None:
            return
        split, place, path = found
        status: os.stat_result | None = None
        with self.problems.collected():
            status = files.of(place)
            if status is None and not self.is_list:
                missing = f"line {row.line}: {place} is missing; add it, or remove the row"
                self.problems.add(SourceIncomplete(missing, path=table.path), "missing")
        if status is None and not self.is_list:
            return
        with self.problems.collected("label"), self.at(table.path, lambda: row.line):
            if table.label_at is None:
                label = self.labels.of_folder(path)
            else:
                label = self.labels.of_cell(row.cells[table.label_at])
        if self.kinds:
            with self.problems.collected("row"), self.at(table.path, lambda: row.line):
                for cell, kind in zip(table.cells, self.kinds.values(), strict=True):
                    kind.add(row.cells[cell])
        if label is None:
            return
        one = self.split_images(split, table.path)
        if status is None:
            one.missing += 1
            one.first_missing = one.first_missing or f"{self.root / place} in line {row.line}"
        elif not self.is_left_out(one, place, status):
            with self.problems.collected():
                self._append(one, row, place, path, label, status)

    def _append(
        self, one: SplitImages, row: TableRow, place: str, path: str, label: int, status: os.stat_result
    ) -> None:
        taken = one.table.append(
            record_key(path.partition("/")[0], path),
            label,
            length=status.st_size + (row.length if self.keeps_rows else 0),
            image_bytes=status.st_size,
            path=place.encode(),
            offset=row.offset if self.keeps_rows else 0,
            mtime_ns=mtime_of(status),
            more=(status.st_size, row.length) if self.keeps_rows else (),
        )
        if taken:
            one.lines.append(row.line)

    def finish(self) -> None:
        """Set the fields, the label space, and the entries with the labels in it.

        Repeated images are added to the problems.
        """
        self.fields = tuple(kind.field for kind in self.kinds.values())
        self.space, numbers = self.labels.numbered()
        for one in self.images.values():
            one.entries = one.table.finish(one.lines)
            one.entries["label"] = numbers[one.entries["label"]]

    def listing(self, split: str, layout: str, table: ListedTable, kept: Sequence[str]) -> Listing:
        """Return the listing of a split, which lies in the table."""
        one, follow = self.images[split], self.options.follow_symlinks
        reader: ByteReader = TreeReader(self.root, follow)
        if self.keeps_rows:
            images = TreeReader(self.root, follow, ("path", ROW_COLUMNS[0][0], "mtime_ns"))
            reader = RowReader(images, table.path, table.identity, table.form, self.fields, table.cells)
        return Listing(
            split=split,
            layout=layout,
            entries=one.entries,
            labels=self.space,
            reader=reader,
            archives=(archive_of(table.path),),
            problems=self.problems,
            ignored=dict(one.ignored),
            notes=left_out_note(table.left_out),
            options=self.options.kept(*kept),
            schema=Schema(self.fields),
        )


class ImageLabels:
    """The classes of all images of a source, numbered as they come.

    With a column of labels these are its values; an empty one is no label, or an error where each image
    ``needs_label``. Otherwise the classes are the folders, where every image lies in one and there are two or
    more; if not, no image has a label.
    """

    def __init__(self, *, needs_label: bool = False) -> None:
        self._needs_label = needs_label
        self._listed = ListedClasses()
        self._folders: dict[str, int] = {}
        self._has_loose = False
        self._has_column = False

    def of_cell(self, cell: Any) -> int:
        """Return the number of the class in a cell of the column. Raises ValueError for anything else."""
        self._has_column = True
        if cell is None and self._needs_label:
            raise ValueError("has no label")
        name = "" if cell is None else label_name(cell).strip()
        return self._listed.label_of(name) if name or self._needs_label else UNLABELLED

    def of_folder(self, path: str) -> int:
        """Return the number of the class of the image at ``path``, below the folder of its split."""
        folder, inside, _ = path.partition("/")
        if not inside:
            self._has_loose = True
            return UNLABELLED
        return -2 - self._folders.setdefault(folder, len(self._folders))

    def numbered(self) -> tuple[LabelSpace, npt.NDArray[np.int32]]:
        """Return the space of all classes, and the label in it of each number.

        Classes in cells count from 0 on, and folders from -2 down: from the end, where that of none is last.
        """
        of_folders = np.full(len(self._folders), UNLABELLED, np.int32)
        of_cells = np.empty(0, np.int32)
        space = LabelSpace.of(())
        if self._has_column and len(self._listed):
            space, of_cells = self._listed.numbered()
        elif not self._has_column and not self._has_loose and len(self._folders) > 1:
            space = LabelSpace.of(self._folders)
            of_folders[:] = [space.label_of[name] for name in self._folders]
        return space, np.concatenate([of_cells, of_folders[::-1], [np.int32(UNLABELLED)]])


@dataclass
class RowReader(ImagesAndFile):
    """Reader of images below a folder, and of the rows of the table at ``path``, each read in its place.

    ``cells`` are the places of the fields in a row.
    """

    form: TableForm
    fields: tuple[Field, ...]
    cells: tuple[int, ...]

    def values(self, entry: np.void) -> tuple[bytes, ...]:
        length, offset = int(entry["row_length"]), int(entry["offset"])
        data = self.opened[1].read_at(length, offset)
        if len(data) < length:
            raise SourceDamaged("ends before its last row does; start again", path=self.path)
        with foreign_file(self.path, "start again", place=lambda: f"the row at byte {offset}: "):
            row = self.form.cells(data)
        typed = not self.form.delimiter
        cells = zip(self.fields, self.cells, strict=True)
        return tuple(encoded_cell(field, row[place], typed=typed) for field, place in cells)
