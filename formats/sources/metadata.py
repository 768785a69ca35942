"""The source of a folder of images with a table beside them: metadata.csv or metadata.jsonl."""

from __future__ import annotations

import os
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import SourceDamaged, SourceIncomplete, UsageError
from shardprep.formats.records.labels import UNLABELLED, LabelSpace
from shardprep.formats.records.schema import Field, Schema
from shardprep.formats.runtime.files import ArchiveFile, Identity, foreign_file
from shardprep.formats.sources.listing import EntryTable, add_unlisted, record_key
from shardprep.formats.sources.source import (
    SPLIT_COLUMN,
    SPLITS,
    Entries,
    Listing,
    Problems,
    Source,
    SourceOptions,
    no_such_split,
    split_folders,
    split_of,
)
from shardprep.formats.sources.tables import (
    MAX_ROW_BYTES,
    CellKind,
    FileStatus,
    ImagesAndFile,
    Lines,
    ListedClasses,
    TableForm,
    TableRow,
    cell_kinds,
    encoded_cell,
    label_name,
    left_out_note,
    place_below,
)
from shardprep.formats.sources.tar import archive_of
from shardprep.formats.sources.trees import TreeReader, mtime_of, other_folders, other_folders_note

ROW_COLUMNS = (("image_length", "<i8"), ("row_length", "<i8"))
"""The columns of the entries beside those of every source; an entry's offset is that of its row."""

LAYOUT = "metadata"
NAMES = ("metadata.csv", "metadata.jsonl")
PATH_NAME = "file_name"
LABEL_NAMES = ("label", "class", "class_name", "wnid", "synset")


def metadata_folder(path: Path, split: str | None, options: SourceOptions) -> MetadataFolder | None:
    """Return the source of a folder with a table in it, or in its splits; None without any.

    Without folders of splits it is taken for ``split``, or for train.

    Raises:
        UsageError: There are two tables of the same images, or a folder of a split has none.
    """
    places = split_folders(path)
    of_split = {name: table for name, folder in places.items() if (table := _table_in(path / folder))}
    whole = _table_in(path)
    if whole and of_split:
        raise UsageError(
            "has a table, and so has the folder of a split; keep one table for each image", path=whole
        )
    if not whole and not of_split:
        return None
    if whole and not places:
        places = {split or "train": ""}
    tables = dict.fromkeys(places, whole) if whole else of_split
    for name, folder in places.items():
        if not tables.get(name):
            raise UsageError(f"lacks a table, which other splits have; add {NAMES[0]}", path=path / folder)
    return MetadataFolder(path, places, {name: table for name, table in tables.items() if table}, options)


def _table_in(folder: Path) -> Path | None:
    found = [folder / name for name in NAMES if (folder / name).is_file()]
    if len(found) > 1:
        raise UsageError(f"has {' and '.join(NAMES)}; keep one of them", path=folder)
    return found[0] if found else None


@dataclass(frozen=True)
class MetadataFolder(Source):
    """Images in folders, and a row for each of them in a table.

    ``places`` has the folder of each split relative to ``root``, and ``tables`` the table of each: its own,
    or one for all. All tables have the same columns.
    """

    root: Path
    places: Mapping[str, str]
    tables: Mapping[str, Path]
    source_options: SourceOptions

    @property
    def splits(self) -> tuple[str, ...]:
        if "" not in self.places.values():
            return tuple(self.places)
        return tuple(split for split in SPLITS if split in self._found.images)  # a column may say the split

    @property
    def folders(self) -> tuple[Path, ...]:
        return tuple(self.root / place for place in self.places.values())

    @property
    def description(self) -> str:
        names = ", ".join(dict.fromkeys(str(table.relative_to(self.root)) for table in self.tables.values()))
        return f"{LAYOUT}: {', '.join(self.splits)}, with columns of {names}"

    def survey(self, split: str) -> Listing:
        if split not in self.splits:
            raise no_such_split(split, self.splits)
        found, options = self._found, self.source_options
        table = found.tables[self.tables.get(split) or next(iter(self.tables.values()))]
        images = TreeReader(self.root, options.follow_symlinks, ("path", ROW_COLUMNS[0][0], "mtime_ns"))
        return Listing(
            split=split,
            layout=LAYOUT,
            entries=found.images[split].entries,
            labels=found.labels,
            reader=MetadataReader(images, table.path, table.identity, table.form, found.fields, table.cells),
            archives=(archive_of(table.path),),
            problems=found.problems,
            ignored=dict(found.ignored.get(split, {})),
            notes=(
                *left_out_note(table.left_out),
                *other_folders_note(other_folders(self.root, self.folders)),
            ),
            options=options.kept("follow_symlinks", "path_column", "label_column", "columns"),
            schema=Schema(found.fields),
        )

    @cached_property
    def _found(self) -> MetadataTables:
        found = MetadataTables(self.root, self.tables, self.places)
        found.read(self.source_options)
        return found


class ReadTable(NamedTuple):
    """A table: its file, its form, and the places in a row of path, label, split and columns."""

    path: Path
    identity: Identity
    form: TableForm
    path_at: int
    label_at: int | None
    split_at: int | None
    cells: tuple[int, ...]

    @property
    def left_out(self) -> list[str]:
        """The names of the columns that are not taken."""
        used = (self.path_at, self.label_at, self.split_at, *self.cells)
        return [name for at, name in enumerate(self.form.names) if at not in used]


class SplitImages:
    """The images of one split, as rows list them; ``place`` is the split's folder below the root."""

    entries: Entries

    def __init__(self, place: str, table: Path, problems: Problems) -> None:
        self.place = place
        self._table = EntryTable(table, problems, ROW_COLUMNS)
        self._lines = array("q")

    def append(self, path: str, label: int, row: TableRow, status: os.stat_result) -> None:
        """Add the image at ``path`` below the place."""
        taken = self._table.append(
            record_key(path.partition("/")[0], path),
            label,
            length=status.st_size + row.length,
            image_bytes=status.st_size,
            path=f"{self.place}/{path}".lstrip("/").encode(),
            offset=row.offset,
            mtime_ns=mtime_of(status),
            more=(status.st_size, row.length),
        )
        if taken:
            self._lines.append(row.line)

    def finish(self, numbers: npt.NDArray[np.int32]) -> None:
        """Set ``entries``, with the labels of these numbers; repeated images are added to the problems."""
        self.entries = self._table.finish(self._lines)
        self.entries["label"] = numbers[self.entries["label"]]


class MetadataTables:
    """Rows of a folder's tables, for each split in ``places``.

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
            with (
                ArchiveFile(path) as file,
                FileStatus(self._root, follow_symlinks=options.follow_symlinks) as files,
            ):
                with _at(path, lambda: 1):
                    table = self.tables[path] = self._table(file, options)
                if table.split_at is not None:
                    self.images.clear()  # each split comes with its first row
                self._read_rows(table, Lines(file, MAX_ROW_BYTES), splits, files)
            if not self.images:
                self.images[splits[0]] = SplitImages("", path, self.problems)
        self.fields = tuple(kind.field for kind in self._kinds.values())
        self.labels, numbers = self._numbers.numbered()
        listed: dict[str, list[npt.NDArray[np.bytes_]]] = {}
        for one in self.images.values():
            one.finish(numbers)
            listed.setdefault(one.place, []).append(one.entries["path"])
        for split, one in self.images.items():
            if paths := listed.pop(one.place, []):
                self.ignored[split] = add_unlisted(
                    self._root,
                    one.place,
                    np.concatenate(paths),
                    self.problems,
                    "has no row in the table; add one, or remove it",
                    follow_symlinks=options.follow_symlinks,
                )

    def _table(self, file: ArchiveFile, options: SourceOptions) -> ReadTable:
        """Return the table in a file by its first line. Raises ValueError, UsageError."""
        form = TableForm.of(file)
        names, there = form.names, ", ".join(form.names)[:200]
        path, label = options.path_column or PATH_NAME, options.label_column
        if label is not None and label not in names:
            raise ValueError(f"has no column {label!r}; its columns are: {there}")
        if path not in names:
            raise ValueError(
                f"has no column {path!r}; name the column of paths with --path-column, one of: {there}"
            )
        if label is None:
            label = next((name for name in LABEL_NAMES if name in names), None)
        split_at = self._split_column(form, file, options)
        used = [path, label or path, *([names[split_at]] if split_at is not None else [])]
        kinds = cell_kinds(names, options.column_choices, used, typed=not form.delimiter)
        of_header = {kind.header: kind for kind in kinds.values()}
        self._kinds = self._kinds or of_header
        if self._kinds.keys() != of_header.keys():
            raise ValueError(
                "has different columns from the table of another split; give all tables the same columns"
            )
        cells = tuple(names.index(header) for header in self._kinds)
        label_at = None if label is None else names.index(label)
        return ReadTable(file.path, file.identity, form, names.index(path), label_at, split_at, cells)

    def _split_column(self, form: TableForm, file: ArchiveFile, options: SourceOptions) -> int | None:
        """Return the place of a column that says the split of each row; None without one.

        Where splits have folders, or the column is chosen as one of values, or has other values, it is none.
        """
        chosen = {choice.origin for choice in options.column_choices}
        at = next((at for at, name in enumerate(form.names) if name.lower() == SPLIT_COLUMN), None)
        if at is None or form.names[at] in chosen or {one.place for one in self.images.values()} != {""}:
            return None
        with suppress(ValueError):  # it is said when the rows are read
            rows = form.rows(Lines(file, MAX_ROW_BYTES))
            return at if all(isinstance(row, ValueError) or split_of(row.cells[at]) for row in rows) else None
        return None

    def _read_rows(self, table: ReadTable, lines: Lines, splits: Sequence[str], files: FileStatus) -> None:
        of_place = {self.images[split].place: split for split in splits if split in self.images}
        with _at(table.path, lambda: lines.number):
            for row in table.form.rows(lines):
                line = row.line if isinstance(row, TableRow) else lines.number
                with self.problems.collected("row"), _at(table.path, lambda line=line: line):  # type: ignore[misc]
                    self._add(table, row, of_place, files)

    def _add(
        self, table: ReadTable, row: TableRow | ValueError, splits: Mapping[str, str], files: FileStatus
    ) -> None:
        """Add a row; ``splits`` has the split of each folder."""
        if isinstance(row, ValueError):
            raise row
        given = row.cells[table.path_at]
        if not isinstance(given, str) or given.startswith("/"):
            raise ValueError(f"names a file that is not beside the table: {str(given)[:200]!r}")
        beside = table.path.parent.relative_to(self._root).as_posix()
        place = place_below(f"{beside}/{given}", [self._root])
        folder, _, path = ("", "", place) if "" in splits or not splits else place.partition("/")
        split = splits.get(folder) if table.split_at is None else split_of(row.cells[table.split_at])
        if split is None or not path:
            raise ValueError(f"{place[:200]!r} is not in the folder of a split: {', '.join(splits)}")
        with self.problems.collected("missing"):
            status = files.of(place)
            if status is None:
                missing = f"line {row.line}: {place} is missing; add it, or remove the row"
                raise SourceIncomplete(missing, path=table.path)
            if split not in self.images:
                self.images[split] = SplitImages("", table.path, self.problems)
            numbers, label_at = self._numbers, table.label_at
            label = numbers.of_folder(path) if label_at is None else numbers.of_cell(row.cells[label_at])
            self.images[split].append(path, label, row, status)
            for at, kind in zip(table.cells, self._kinds.values(), strict=True):
                kind.add(row.cells[at])


def _at(path: Path, line: Callable[[], int]) -> AbstractContextManager[None]:
    return foreign_file(path, "correct the table", place=lambda: f"line {line()}: ")


class ImageLabels:
    """The classes of all images of a source, numbered as they come.

    With a column of labels these are its values; an empty one is no label. Otherwise the classes are the
    folders, where every image lies in one and there are two or more; if not, no image has a label.
    """

    def __init__(self) -> None:
        self._listed = ListedClasses()
        self._folders: dict[str, int] = {}
        self._has_loose = False
        self._has_column = False

    def of_cell(self, cell: Any) -> int:
        """Return the number of the class in a cell of the column. Raises ValueError for what is none."""
        self._has_column = True
        name = "" if cell is None else label_name(cell).strip()
        return self._listed.label_of(name) if name else UNLABELLED

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
class MetadataReader(ImagesAndFile):
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
