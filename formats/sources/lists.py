"""The sources of images listed in tables.

A list is text, CSV or JSON Lines with a path and a label in each row. A folder of images has metadata.csv or
metadata.jsonl beside them, with a path and columns.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np

from shardprep.formats.errors import SourceDamaged, SourceIncomplete, UsageError
from shardprep.formats.records.record import UNLABELLED
from shardprep.formats.records.schema import BadValue, Field, Schema
from shardprep.formats.runtime.files import ArchiveFile, errors_as_damage
from shardprep.formats.runtime.progress import count_of
from shardprep.formats.runtime.user_paths import user_path
from shardprep.formats.shards.dataset import SPLITS
from shardprep.formats.sources.coco import refuse_coco_file
from shardprep.formats.sources.listing import Classes, EntryTable, find_unlisted, record_key
from shardprep.formats.sources.source import (
    IMAGE_SUFFIXES,
    SPLIT_COLUMN,
    ByteReader,
    Entries,
    Listing,
    Problems,
    Source,
    SourceOptions,
    split_folders,
    split_from_cell,
    split_from_name,
)
from shardprep.formats.sources.tables import (
    CSV_SUFFIXES,
    TABLE_SUFFIXES,
    ColumnKind,
    ImagesAndFile,
    Lines,
    TableForm,
    TableRow,
    column_kinds,
    encode_cell,
    label_name,
    read_row,
    relative_path,
)
from shardprep.formats.sources.tar import describe_archive
from shardprep.formats.sources.trees import (
    IMAGE_COLUMNS,
    NON_IMAGES,
    FolderWalk,
    TreeReader,
    holds_images,
    other_folders_note,
)

PATH_COLUMNS = (
    *("path", "file", "filename", "file_name", "filepath", "file_path", "image", "image_path", "image_file"),
    *("img", "img_path", "image_name", "image_id", "imageid", "id"),
)
LABEL_COLUMNS = (
    *("label", "class", "class_name", "category", "target", "labels", "label_name", "class_id", "label_id"),
    *("wnid", "synset", "y", "classid"),
)
_TEXT_SUFFIXES = (".txt", ".lst", ".list")
_PLAIN_COLUMNS = ("path", "label")


@dataclass(frozen=True)
class ImageTable:
    """A table of images: its columns of paths, labels and splits, the kinds of others, and all names.

    Without such a column, ``label_column`` is None if folders may be classes, and "" if no image has any.
    """

    file: ArchiveFile
    form: TableForm
    path_column: str = "path"
    label_column: str | None = "label"
    split_column: str | None = None
    kinds: dict[str, ColumnKind] = field(default_factory=dict)
    column_names: dict[str, None] = field(default_factory=dict)  # of all rows


@dataclass
class SplitImages:
    """The listed images of a split; ``missing`` counts missing files, and ``ignored`` skipped ones."""

    table: ImageTable
    rows: EntryTable
    missing: int = 0
    first_missing: str = ""
    ignored: Counter[str] = field(default_factory=Counter)
    entries: Entries = field(init=False)


@dataclass(frozen=True)
class TableSource(Source):
    """Images below ``root``, listed in tables; those of a list may be missing or skipped.

    ``places`` has the folder of each split, relative to ``root``, and ``tables`` the table: its own or one
    for all. All tables have the same columns.
    """

    OPTIONS: ClassVar[tuple[str, ...]] = ("path_column", "label_column", "columns")
    is_list: ClassVar[bool] = False

    root: Path
    source_options: SourceOptions
    places: Mapping[str, str]
    tables: Mapping[str, Path]

    @abstractmethod
    def read_header(self, file: ArchiveFile) -> ImageTable:
        """Read the header of a table. Raises ValueError, UsageError."""

    @abstractmethod
    def locate(self, table: ImageTable, row: TableRow) -> tuple[str, str, str]:
        """Return an image's split, and its path below the root and below the split. Raises ValueError."""

    @property
    def splits(self) -> tuple[str, ...]:
        # without split folders, there may be a column of splits
        by_split = self.listed_images.by_split if "" in self.places.values() else self.places
        return tuple(split for split in SPLITS if split in by_split)

    @cached_property
    def listed_images(self) -> ListedImages:
        return ListedImages(self)

    def list_split(self, split: str, known_entries: Entries | None) -> Listing:
        listed, follow = self.listed_images, self.source_options.follow_symlinks
        images = listed.by_split[split]
        table = images.table
        files = TreeReader(self.root, follow, IMAGE_COLUMNS)
        reader: ByteReader = files
        if listed.fields:
            reader = RowReader(files, table.file.path, table.file.identity, table.form, listed.fields)
        names = ("follow_symlinks", "skip_non_images") if self.is_list else ("follow_symlinks",)
        notes = () if self.is_list else other_folders_note(self.root, self.folders)
        used = {table.path_column, table.label_column, table.split_column, *table.kinds, ""}
        if unused := ", ".join(name for name in table.column_names if name not in used):
            notes = (f"columns left out: {unused}; take one with --column NAME", *notes)
        shortfall = f"{count_of(images.missing, 'file')} missing, first {images.first_missing}"
        if not len(images.entries):
            shortfall += "; give the folder that the paths are relative to with --root"
        return Listing(
            split,
            self.LAYOUT,
            images.entries,
            listed.space,
            reader,
            archives=(describe_archive(table.file.path),),
            expected=len(images.entries) + images.missing if self.is_list else None,
            shortfall=shortfall if images.missing else "",
            problems=listed.problems,
            ignored=dict(images.ignored),
            notes=notes,
            options=self.source_options.kept(*names, *TableSource.OPTIONS),
            schema=Schema(listed.fields.values()),
        )


class ListedImages:
    """The listed images of each split, and the problems of rows and images.

    ``kinds`` are the columns' kinds by header, the same in all tables. Entries have the line of their row,
    and its place if there are any. Raises SourceDamaged where no further row of a table can be read, and
    UsageError for missing columns.
    """

    def __init__(self, source: TableSource) -> None:
        self._source, self.problems = source, Problems()
        self.by_split: dict[str, SplitImages] = {}
        self.kinds: dict[str, ColumnKind] = {}
        self.classes = Classes()
        self._walk = FolderWalk(source.root, source.source_options.follow_symlinks, self.problems)
        tables = {path: self._read_table(path) for path in dict.fromkeys(source.tables.values())}
        for split, path in source.tables.items():
            if not tables[path].split_column or not self.by_split:
                self._split_images(split, tables[path])
        self.fields = {header: kind.field for header, kind in self.kinds.items()}
        self.space, labels = self.classes.assign_labels()
        for images in self.by_split.values():
            images.entries = images.rows.finish()
            images.entries["label"] = labels[images.entries["label"]]
        if not source.is_list and not self.problems.has("row", "path", "label"):  # all rows are known
            for place in dict.fromkeys(source.places.values()):
                own = [each for split, each in self.by_split.items() if source.places.get(split, "") == place]
                listed = np.concatenate([each.entries["path"] for each in own])
                walk = replace(self._walk, ignored=Counter())
                advice = "has no row in the table; add one, or remove it"
                for path in find_unlisted(walk, place, listed):
                    walk.problems.add(SourceDamaged(advice, path=path))
                own[0].ignored = walk.ignored

    def _split_images(self, split: str, table: ImageTable) -> SplitImages:
        if split not in self.by_split:
            columns = [(name, "<i8") for name in ("line", "image_length", "row_length")]
            self.by_split[split] = SplitImages(table, EntryTable(table.file.path, self.problems, columns))
        return self.by_split[split]

    def _read_table(self, path: Path) -> ImageTable:
        """Read all rows of a table, and collect the problems with them."""
        with ArchiveFile(path) as file:
            with self._errors_at(path, lambda: 1):
                table = self._source.read_header(file)
                self.kinds = self.kinds or table.kinds
                if self.kinds.keys() != table.kinds.keys():
                    raise ValueError(
                        "has different columns from the table of another split; give all tables the same columns"
                    )
            lines = Lines(file)
            with self._errors_at(path, lambda: lines.number):
                for row in table.form.rows(lines):
                    if isinstance(row, TableRow):
                        self._add_row(table, row)
                        continue
                    with self.problems.collect("row"), self._errors_at(path, lambda: lines.number):
                        raise row
        return table

    def _errors_at(self, path: Path, line: Callable[[], int]) -> AbstractContextManager[None]:
        return errors_as_damage(path, "correct the table", place=lambda: f"line {line()}: ")

    def _add_row(self, table: ImageTable, row: TableRow) -> None:
        """Add a row. The label and cells of a missing file's row count only in a list."""
        table.column_names.update(dict.fromkeys(row.cells))  # JSON objects may have more
        place = file = label = None
        is_list = self._source.is_list
        with self.problems.collect("path"), self._errors_at(table.file.path, lambda: row.line):
            split, place, path = self._source.locate(table, row)
        if place is None:
            return
        with self.problems.collect(), self._errors_at(table.file.path, lambda: row.line):
            file = self._walk.find(place)
            if file is None and not place.lower().endswith(IMAGE_SUFFIXES):
                files = list(filter(None, (self._walk.find(place + suffix) for suffix in IMAGE_SUFFIXES)))
                if len(files) > 1:
                    raise ValueError(f"{place} is {files[0].path} or {files[1].path}; add the extension")
                file = files[0] if files else None
            if file is None and not is_list:
                missing = f"line {row.line}: {place} is missing; add it, or remove the row"
                self.problems.add(SourceIncomplete(missing, path=table.file.path), "missing")
        if file is None and not is_list:
            return
        with self.problems.collect("label"), self._errors_at(table.file.path, lambda: row.line):
            if not table.label_column:
                label = self.classes.add_folder(path) if table.label_column is None else UNLABELLED
            else:
                cell = row.cells[table.label_column]
                name = "" if cell is None else label_name(cell).strip()
                if is_list and not name:
                    raise ValueError("has no label")
                label = self.classes.add_text("" if name == "-1" and not is_list else name)
        if self.kinds:
            with self.problems.collect("row"), self._errors_at(table.file.path, lambda: row.line):
                for header, kind in self.kinds.items():
                    kind.add(row.cells[header])
        if label is None:
            return
        images = self._split_images(split, table)
        if file is None:
            images.missing += 1
            images.first_missing = images.first_missing or f"{self._source.root / place} in line {row.line}"
            return
        if is_list and self._source.source_options.skip_non_images and self._walk.skip_non_image(file):
            images.ignored[NON_IMAGES] += 1
            return
        length, offset = (row.length, row.offset) if self.kinds or not is_list else (0, 0)
        images.rows.append(
            record_key(path.partition("/")[0], path),
            label,
            length=file.size + length,
            offset=offset,
            file=file,
            extra=(row.line, file.size, length),
        )


@dataclass
class RowReader(ImagesAndFile):
    """Reader of images and of their rows in a table; ``fields`` are the columns' fields by header."""

    form: TableForm
    fields: Mapping[str, Field]

    def values(self, entry: np.void) -> tuple[bytes, ...]:
        length, offset = int(entry["row_length"]), int(entry["offset"])
        row = read_row(self.resource[1], length, offset, self.form.parse_row)
        typed = not self.form.delimiter
        try:
            return tuple(encode_cell(field, row[name], typed=typed) for name, field in self.fields.items())
        except BadValue as error:
            raise BadValue(f"{self.path.name}, line {entry['line']}: {error.message}") from error


def recognise_list(path: Path, split: str | None, options: SourceOptions) -> LabelledList | None:
    """Return the source of a list, as ``split``, the split in its name, or train; else None.

    With options for lists only, any file is taken for one. Raises UsageError if the root is not a folder, or
    the file has COCO's instances.
    """
    of_lists = (*_TEXT_SUFFIXES, *TABLE_SUFFIXES)
    has_name = path.suffix.lower() in of_lists or options.kept("root", "path_column", "label_column")
    if not path.is_file() or not has_name:
        return None
    refuse_coco_file(path)
    root = (path.parent if options.root is None else user_path(options.root)).resolve()
    if not root.is_dir():
        raise UsageError("is not a folder", path=root)
    split = split or split_from_name(path.name) or "train"
    return LabelledList(root, options, {split: ""}, {split: path})


@dataclass(frozen=True)
class LabelledList(TableSource):
    """A list of files below ``root`` with their labels; all are of its split unless a column tells.

    Labels that are numbers stay the same, and name their classes, such as ``00042``. Class names are numbered
    alphabetically.
    """

    LAYOUT = "image-list"
    OPTIONS = ("root", *TableSource.OPTIONS)
    is_list = True

    @property
    def description(self) -> str:
        return f"{super().description}, with files below {self.root}"

    def read_header(self, file: ArchiveFile) -> ImageTable:
        options, suffix = self.source_options, file.path.suffix.lower()
        names_columns = bool(options.kept("path_column", "label_column", "columns"))
        if suffix not in TABLE_SUFFIXES:
            if names_columns:
                raise ValueError(
                    "needs named columns, which a text file does not have; give a CSV or JSON Lines file"
                )
            return ImageTable(file, TableForm(_PLAIN_COLUMNS, is_text=True))
        is_json = suffix not in CSV_SUFFIXES
        form = TableForm.of_objects(file) if is_json else TableForm.of(file, unique=False)
        names = form.names if is_json else tuple(name.strip() for name in form.names)
        if is_json and not names:  # no line is an object
            return ImageTable(file, form)
        if not is_json and len(names) == 2 and "." in names[0] and not names_columns:
            return ImageTable(file, TableForm(_PLAIN_COLUMNS, form.delimiter, has_header=False))
        path = _choose_column(file, names, options.path_column, PATH_COLUMNS, "--path-column")
        label = options.label_column
        if label != "":
            label = _choose_column(file, names, label, LABEL_COLUMNS, '--label-column ("" for none)')
        choices = options.column_choices
        used = {path, label, *(choice.origin for choice in choices)}
        split = next((name for name in names if name.lower() == SPLIT_COLUMN and name not in used), None)
        kinds = column_kinds(names, choices, (), typed=is_json) if choices else {}
        used_names = tuple(dict.fromkeys(name for name in (path, label, split, *kinds) if name))
        if twice := next((name for name in used_names if names.count(name) > 1), None):
            raise ValueError(f"has the column {twice!r} twice; rename one")
        form = TableForm(used_names if is_json else names, form.delimiter, is_open=is_json)
        return ImageTable(file, form, path, label, split, kinds, dict.fromkeys(names))

    def locate(self, table: ImageTable, row: TableRow) -> tuple[str, str, str]:
        path, (split,) = row.cells[table.path_column], self.tables
        if not isinstance(path, str):
            raise ValueError(f"has no text under {table.path_column!r}")
        if table.split_column is not None:
            cell = row.cells[table.split_column]
            found = split_from_cell(cell)
            if found is None:
                raise ValueError(
                    f"has the {SPLIT_COLUMN} {str(cell)[:80]!r}, an unknown split name (splits are "
                    f"{', '.join(SPLITS)}); correct it, or take the column as values with --column "
                    f"NAME:KIND={table.split_column}"
                )
            split = found
        place = relative_path(path.strip(), self._roots)
        return split, place, place

    @cached_property
    def _roots(self) -> list[Path]:
        """The root with links resolved and as it was given: absolute paths may begin with either."""
        root = self.source_options.root
        return [self.root] if root is None else [self.root, user_path(root).absolute()]


def _choose_column(
    file: ArchiveFile, names: Sequence[str], wanted: str | None, known: Sequence[str], option: str
) -> str:
    """Return the wanted column, or else the first known one, ignoring case. Raises UsageError."""
    column = find_column(names, known) if wanted is None else wanted
    if not column or column not in names:  # a header may be empty
        looked_for = f"{known[0]!r} or the like" if wanted is None else repr(wanted)
        available = ", ".join(names)[:200]
        raise UsageError(f"has no column {looked_for}; choose one with {option}: {available}", path=file.path)
    return column


def find_column(names: Sequence[str], known: Sequence[str]) -> str:
    """Return the first known name that a column has, ignoring case, as it is in the table; "" for none."""
    by_lower = {name.lower(): name for name in reversed(names)}
    return next((by_lower[name] for name in known if name in by_lower), "")


TABLES = ("metadata.csv", "metadata.jsonl")
PATH_NAME = "file_name"
LABEL_NAMES = ("label", "class", "class_name", "wnid", "synset")


def recognise_metadata(path: Path, split: str | None, options: SourceOptions) -> MetadataFolder | None:
    """Return the source of a folder with a table, or one in each split folder, else None.

    Without split folders it is ``split``, or train. Raises UsageError for two tables of the same images, or
    if only some split folders have one.
    """
    places = split_folders(path)
    by_split = {name: table for name, folder in places.items() if (table := _find_table(path / folder))}
    whole = _find_table(path)
    if whole and by_split:
        raise UsageError(
            "has a table, and so has the folder of a split; keep one table for each image", path=whole
        )
    if not whole and not by_split:
        return None
    if whole:
        places = places or {split or "train": ""}
        by_split = dict.fromkeys(places, whole)
    for name, folder in places.items():
        if name not in by_split:
            raise UsageError(f"lacks a table, which other splits have; add {TABLES[0]}", path=path / folder)
    return MetadataFolder(path, options, places, by_split)


def _find_table(folder: Path) -> Path | None:
    tables = [folder / name for name in TABLES if (folder / name).is_file()]
    if len(tables) > 1:
        raise UsageError(f"has {' and '.join(TABLES)}; keep one of them", path=folder)
    if not tables and (unread := folder / "metadata.parquet").is_file() and holds_images(folder):
        raise UsageError(f"is not read beside images; write its rows to {TABLES[1]}", path=unread)
    return tables[0] if tables else None


@dataclass(frozen=True)
class MetadataFolder(TableSource):
    """Images in folders with a row each in a table."""

    LAYOUT = "metadata"

    @property
    def folders(self) -> tuple[Path, ...]:
        return tuple((self.root / place).resolve() for place in self.places.values())

    @property
    def description(self) -> str:
        names = ", ".join(dict.fromkeys(str(table.relative_to(self.root)) for table in self.tables.values()))
        return f"{super().description}, with columns of {names}"

    def read_header(self, file: ArchiveFile) -> ImageTable:
        form, options = TableForm.of(file), self.source_options
        names = form.names
        path = _choose_column(file, names, options.path_column or PATH_NAME, (), "--path-column")
        label = next((name for name in LABEL_NAMES if name in names), None)
        if options.label_column is not None:
            wanted = options.label_column
            label = wanted and _choose_column(file, names, wanted, (), "--label-column")
        used = (path, label, self._split_column(form, file))
        kinds = column_kinds(names, options.column_choices, used, typed=not form.delimiter)
        return ImageTable(file, form, *used, kinds, dict.fromkeys(names))

    def _split_column(self, form: TableForm, file: ArchiveFile) -> str | None:
        """Return the column of splits, unless splits have folders, or it is chosen, or has other values."""
        chosen = {choice.origin for choice in self.source_options.column_choices}
        name = next((name for name in form.names if name.lower() == SPLIT_COLUMN), None)
        if name is None or name in chosen or {*self.places.values()} != {""}:
            return None
        with suppress(ValueError):  # reported when the rows are read
            rows = form.rows(Lines(file))
            if all(isinstance(row, ValueError) or split_from_cell(row.cells[name]) for row in rows):
                return name
        return None

    def locate(self, table: ImageTable, row: TableRow) -> tuple[str, str, str]:
        cell, split_column = row.cells[table.path_column], table.split_column
        if not isinstance(cell, str) or cell.startswith("/"):
            raise ValueError(f"names a file that is not beside the table: {str(cell)[:200]!r}")
        beside = table.file.path.parent.relative_to(self.root).as_posix()
        place = relative_path(f"{beside}/{cell}", [self.root])
        splits = {self.places[split]: split for split, path in self.tables.items() if path == table.file.path}
        folder, _, path = ("", "", place) if "" in splits else place.partition("/")
        split = splits.get(folder) if split_column is None else split_from_cell(row.cells[split_column])
        if split is None or not path:
            raise ValueError(f"{place[:200]!r} is not in the folder of a split: {', '.join(splits)}")
        return split, place, path
