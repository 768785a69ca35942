"""The source of a list of images: a path and a label in each row, in text, CSV or JSON lines."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from shardprep.formats.errors import SourceIncomplete, UsageError
from shardprep.formats.runtime.files import ArchiveFile, user_path
from shardprep.formats.runtime.sizes import count_of
from shardprep.formats.sources.coco import refuse_coco_file
from shardprep.formats.sources.rows import ListedImages, ListedTable, SplitImages
from shardprep.formats.sources.source import (
    SPLIT_COLUMN,
    SPLITS,
    Listing,
    Source,
    SourceOptions,
    no_such_split,
    split_in,
    split_of,
)
from shardprep.formats.sources.tables import (
    CSV_SUFFIXES,
    JSON_SUFFIXES,
    TableForm,
    TableRow,
    cell_kinds,
    place_below,
)
from shardprep.formats.sources.trees import FolderWalk, FoundFile, mtime_of

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
        names_columns = bool(options.given("path_column", "label_column", "columns"))
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
