"""The sources of images that rows list: a list with their labels, and a folder with a table beside them.

A list is text, CSV or JSON lines with a path and a label in each row; the table is metadata.csv or
metadata.jsonl, with a path and columns.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import SourceIncomplete, UsageError
from shardprep.formats.runtime.files import ArchiveFile, user_path
from shardprep.formats.runtime.sizes import count_of
from shardprep.formats.sources.coco import refuse_coco_file
from shardprep.formats.sources.listing import add_unlisted
from shardprep.formats.sources.rows import ListedImages, ListedTable, SplitImages
from shardprep.formats.sources.source import (
    SPLIT_COLUMN,
    SPLITS,
    Listing,
    Source,
    SourceOptions,
    no_such_split,
    split_folders,
    split_in,
    split_of,
)
from shardprep.formats.sources.tables import (
    CSV_SUFFIXES,
    JSON_SUFFIXES,
    Lines,
    TableForm,
    TableRow,
    cell_kinds,
    place_below,
)
from shardprep.formats.sources.trees import FolderWalk, FoundFile, mtime_of, other_folders, other_folders_note

PATH_COLUMNS = (
    *("path", "file", "filename", "file_name", "filepath", "file_path", "image", "image_path", "image_file"),
    *("img", "img_path", "image_name"),
)
LABEL_COLUMNS = (
    *("label", "class", "class_name", "category", "target", "labels", "label_name", "class_id", "label_id"),
    *("wnid", "synset", "y"),
)
_TEXT_SUFFIXES = (".txt", ".lst", ".list")
_JSON_SUFFIXES = (*JSON_SUFFIXES, ".json")
LAYOUT = "image-list"
_PLAIN = ("path", "label")
_KEPT = ("follow_symlinks", "skip_non_images", "path_column", "label_column", "columns")


def is_list(path: Path, options: SourceOptions) -> bool:
    """Whether a file of this name is a list. With options that only lists have, any text file is one."""
    suffix = path.suffix.lower()
    return suffix in (*_TEXT_SUFFIXES, *CSV_SUFFIXES, *_JSON_SUFFIXES) or bool(
        options.given("root", "path_column", "label_column")
    )


def labelled_list(path: Path, split: str | None, options: SourceOptions) -> LabelledList | None:
    """Return the source of a list, taken for ``split``, or for that of its name, or for train; else None.

    Raises:
        UsageError: The root is no folder, or the file has COCO's instances.
    """
    if not path.is_file() or not is_list(path, options):
        return None
    refuse_coco_file(path)
    root = (path.parent if options.root is None else user_path(options.root)).resolve()
    if not root.is_dir():
        raise UsageError("is not a folder", path=root)
    return LabelledList(path, split or split_in(path.name) or "train", root, options)


@dataclass(frozen=True)
class LabelledList(Source):
    """A list of files below ``root`` with their labels; all are of ``split`` unless a column says theirs.

    The classes of whole numbers are named for them, such as ``00042``, so each label stays the same. Classes
    of names are numbered in the order of their names.
    """

    path: Path
    split: str
    root: Path
    source_options: SourceOptions

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(split for split in SPLITS if split in self._found.images)

    @property
    def roots(self) -> tuple[Path, ...]:
        """The root, without links and as it was given."""
        given = self.source_options.root
        return (self.root,) if given is None else (self.root, user_path(given).absolute())

    @property
    def description(self) -> str:
        return f"{LAYOUT}: {', '.join(self.splits)}, with files below {self.root}"

    def survey(self, split: str) -> Listing:
        if split not in self.splits:
            raise no_such_split(split, self.splits)
        found = self._found
        one, listing = found.images[split], found.listing(split, LAYOUT, found.table, _KEPT)
        first = f"{count_of(one.missing, 'file')} missing, first {one.first_missing}"
        return replace(
            listing, expected=len(one.entries) + one.missing, shortfall=first if one.missing else ""
        )

    @cached_property
    def _found(self) -> ListImages:
        return ListImages(self)


class ListImages(ListedImages):
    """The images of a list's ``table``."""

    advice = "correct the list"
    is_list = True

    def __init__(self, source: LabelledList) -> None:
        super().__init__(source.root, source.source_options)
        self._source = source
        self.table = self.read_table(source.path)
        if not self.images:  # no row is one
            self.split_images(source.split, source.path)
        every = self.images.values()
        if (missing := sum(one.missing for one in every)) and not any(one.lines for one in every):
            first = next(one.first_missing for one in every if one.missing)
            none = f"none of its {missing} files exists; the first is {first}"
            advice = "give the folder that the paths are relative to with --root"
            self.problems.add(SourceIncomplete(f"{none}; {advice}", path=source.path))
            for one in every:
                one.missing = 0
        self.finish()

    def table_in(self, file: ArchiveFile) -> ListedTable:
        options, suffix = self.options, file.path.suffix.lower()
        choices, self.keeps_rows = options.column_choices, bool(options.columns)
        names_columns = bool(options.path_column or options.label_column or options.columns)
        if suffix not in (*_JSON_SUFFIXES, *CSV_SUFFIXES):
            if names_columns:
                raise ValueError(
                    "needs named columns, which a text file does not have; give a CSV or JSON Lines file"
                )
            return ListedTable(file.path, file.identity, TableForm(_PLAIN, is_text=True))
        is_json = suffix in _JSON_SUFFIXES
        form = TableForm.of_objects(file) if is_json else TableForm.of(file, unique=False)
        names = form.names if is_json else tuple(name.strip() for name in form.names)
        if is_json and not names:  # no line is an object
            return ListedTable(file.path, file.identity, form)
        if not is_json and len(names) == 2 and "." in names[0] and not names_columns:
            form = TableForm(_PLAIN, form.delimiter, has_header=False)
            return ListedTable(file.path, file.identity, form)
        path, label, split = _used_columns(names, options)
        kinds = cell_kinds(names, choices, (), typed=is_json) if choices else {}
        self.kinds = {kind.header: kind for kind in kinds.values()}
        taken = [name for name in dict.fromkeys((path, label, split, *self.kinds)) if name]
        if twice := next((name for name in taken if names.count(name) > 1), None):
            raise ValueError(f"has the column {twice!r} twice; rename one")
        left_out = [] if is_json else [name for name in names if name and name not in taken]
        names = tuple(taken) if is_json else names
        return ListedTable(
            file.path,
            file.identity,
            TableForm(names, form.delimiter, is_open=is_json),
            names.index(path),
            names.index(label),
            names.index(split) if split else None,
            tuple(names.index(header) for header in self.kinds),
            dict.fromkeys(left_out),
        )

    def place_of(self, table: ListedTable, row: TableRow) -> tuple[str, str, str]:
        path, names, split = row.cells[table.path_at], table.form.names, self._source.split
        if not isinstance(path, str):
            raise ValueError(f"has no text under {names[table.path_at]!r}")
        if table.split_at is not None:
            named, cell = split_of(row.cells[table.split_at]), row.cells[table.split_at]
            if named is None:
                raise ValueError(
                    f"has the {SPLIT_COLUMN} {str(cell)[:80]!r}, an unknown split name (known are "
                    f"{', '.join(SPLITS)}); correct it, or take the column as values with --column "
                    f"NAME:KIND={names[table.split_at]}"
                )
            split = named
        place = place_below(path.strip(), self._source.roots)
        return split, place, place

    def is_left_out(self, one: SplitImages, place: str, status: os.stat_result) -> bool:
        walk = FolderWalk(self.root, self.options.follow_symlinks, self.problems, one.ignored)
        file = FoundFile(place, status.st_size, mtime_of(status))
        return self.options.skip_non_images and walk.is_left_out(file)


def _used_columns(names: Sequence[str], options: SourceOptions) -> tuple[str, str, str]:
    """Return the names of the columns of paths, of labels, and of splits, "" if there is none.

    A column of splits that is chosen as a column of values is none.
    """
    by_lower = {name.lower(): name for name in reversed(names)}
    used = []
    for wanted, usual, option in (
        (options.path_column, PATH_COLUMNS, "--path-column"),
        (options.label_column, LABEL_COLUMNS, "--label-column"),
    ):
        found = wanted if wanted in names else None
        if wanted is None:
            found = next((by_lower[name] for name in usual if name in by_lower), None)
        if found is None:
            what = f"no column {wanted!r}" if wanted else "none of the usual columns"
            raise ValueError(f"has {what}; name it with {option}, of these: {', '.join(names)[:200]}")
        used.append(found)
    taken = {*used, *(choice.origin for choice in options.column_choices)}
    splits = (name for name in names if name.lower() == SPLIT_COLUMN and name not in taken)
    return used[0], used[1], next(splits, "")


METADATA = "metadata"
TABLES = ("metadata.csv", "metadata.jsonl")
PATH_NAME = "file_name"
_KEPT_OF_METADATA = ("follow_symlinks", "path_column", "label_column", "columns")
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
            raise UsageError(f"lacks a table, which other splits have; add {TABLES[0]}", path=path / folder)
    return MetadataFolder(path, places, {name: table for name, table in tables.items() if table}, options)


def _table_in(folder: Path) -> Path | None:
    found = [folder / name for name in TABLES if (folder / name).is_file()]
    if len(found) > 1:
        raise UsageError(f"has {' and '.join(TABLES)}; keep one of them", path=folder)
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
        return f"{METADATA}: {', '.join(self.splits)}, with columns of {names}"

    def survey(self, split: str) -> Listing:
        if split not in self.splits:
            raise no_such_split(split, self.splits)
        found = self._found
        table = found.tables[self.tables.get(split) or next(iter(self.tables.values()))]
        listing = found.listing(split, METADATA, table, _KEPT_OF_METADATA)
        notes = other_folders_note(other_folders(self.root, self.folders))
        return replace(listing, notes=(*listing.notes, *notes))

    @cached_property
    def _found(self) -> MetadataImages:
        found = MetadataImages(self.root, self.source_options, self.tables, self.places)
        found.read()
        return found


class MetadataImages(ListedImages):
    """The images of a folder's ``tables``, of one split in ``places`` or of all."""

    advice = "correct the table"

    def __init__(
        self, root: Path, options: SourceOptions, tables: Mapping[str, Path], places: Mapping[str, str]
    ) -> None:
        super().__init__(root, options)
        self.tables: dict[Path, ListedTable] = {}
        self._splits = {path: [s for s in places if tables[s] == path] for path in tables.values()}
        self._of_place = {place: split for split, place in places.items()}
        for split, place in places.items():
            self.split_images(split, tables[split], place)

    def read(self) -> None:
        """Read all tables, and look for images that they do not list."""
        for path, splits in self._splits.items():
            self.tables[path] = self.read_table(path)
            if not self.images:
                self.split_images(splits[0], path)
        self.finish()
        listed: dict[str, list[npt.NDArray[np.bytes_]]] = {}
        for one in self.images.values():
            listed.setdefault(one.place, []).append(one.entries["path"])
        for one in self.images.values():
            if paths := listed.pop(one.place, []):
                one.ignored = add_unlisted(
                    self.root,
                    one.place,
                    np.concatenate(paths),
                    self.problems,
                    "has no row in the table; add one, or remove it",
                    follow_symlinks=self.options.follow_symlinks,
                )

    def table_in(self, file: ArchiveFile) -> ListedTable:
        form, options = TableForm.of(file), self.options
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
        split_at = self._split_column(form, file)
        if split_at is not None:
            self.images.clear()  # each split comes with its first row
        used = [path, label or path, *([names[split_at]] if split_at is not None else [])]
        kinds = cell_kinds(names, options.column_choices, used, typed=not form.delimiter)
        of_header = {kind.header: kind for kind in kinds.values()}
        self.kinds = self.kinds or of_header
        if self.kinds.keys() != of_header.keys():
            raise ValueError(
                "has different columns from the table of another split; give all tables the same columns"
            )
        left_out = dict.fromkeys(name for name in names if name not in used and name not in of_header)
        return ListedTable(
            path=file.path,
            identity=file.identity,
            form=form,
            path_at=names.index(path),
            label_at=None if label is None else names.index(label),
            split_at=split_at,
            cells=tuple(names.index(header) for header in self.kinds),
            left_out=left_out,
        )

    def _split_column(self, form: TableForm, file: ArchiveFile) -> int | None:
        """Return the place of a column that says the split of each row; None without one.

        Where splits have folders, or the column is chosen as one of values, or has other values, it is none.
        """
        chosen = {choice.origin for choice in self.options.column_choices}
        at = next((at for at, name in enumerate(form.names) if name.lower() == SPLIT_COLUMN), None)
        if at is None or form.names[at] in chosen or self._of_place.keys() != {""}:
            return None
        with suppress(ValueError):  # it is said when the rows are read
            rows = form.rows(Lines(file, form.limit))
            return at if all(isinstance(row, ValueError) or split_of(row.cells[at]) for row in rows) else None
        return None

    def place_of(self, table: ListedTable, row: TableRow) -> tuple[str, str, str]:
        given = row.cells[table.path_at]
        if not isinstance(given, str) or given.startswith("/"):
            raise ValueError(f"names a file that is not beside the table: {str(given)[:200]!r}")
        beside = table.path.parent.relative_to(self.root).as_posix()
        place = place_below(f"{beside}/{given}", [self.root])
        splits = {
            place: split for place, split in self._of_place.items() if split in self._splits[table.path]
        }
        folder, _, path = ("", "", place) if "" in splits else place.partition("/")
        split = splits.get(folder) if table.split_at is None else split_of(row.cells[table.split_at])
        if split is None or not path:
            raise ValueError(f"{place[:200]!r} is not in the folder of a split: {', '.join(splits)}")
        return split, place, path
