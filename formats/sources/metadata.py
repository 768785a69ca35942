"""The source of a folder of images with a table beside them: metadata.csv or metadata.jsonl."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import UsageError
from shardprep.formats.runtime.files import ArchiveFile
from shardprep.formats.sources.listing import add_unlisted
from shardprep.formats.sources.rows import ListedImages, ListedTable
from shardprep.formats.sources.source import (
    SPLIT_COLUMN,
    SPLITS,
    Listing,
    Source,
    SourceOptions,
    no_such_split,
    split_folders,
    split_of,
)
from shardprep.formats.sources.tables import Lines, TableForm, TableRow, cell_kinds, place_below
from shardprep.formats.sources.trees import other_folders, other_folders_note

LAYOUT = "metadata"
NAMES = ("metadata.csv", "metadata.jsonl")
PATH_NAME = "file_name"
_KEPT = ("follow_symlinks", "path_column", "label_column", "columns")
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
        found = self._found
        table = found.tables[self.tables.get(split) or next(iter(self.tables.values()))]
        listing = found.listing(split, LAYOUT, table, _KEPT)
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
