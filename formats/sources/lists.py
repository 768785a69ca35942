"""The source of a list of images: a path and a label in each row, in text, CSV or JSON lines."""

from __future__ import annotations

import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from shardprep.formats.errors import SourceIncomplete, UsageError
from shardprep.formats.records.labels import LabelSpace
from shardprep.formats.records.schema import Schema
from shardprep.formats.runtime.files import ArchiveFile, Identity, foreign_file, user_path
from shardprep.formats.runtime.sizes import count_of
from shardprep.formats.sources.coco import refuse_coco_file
from shardprep.formats.sources.listing import EntryTable, record_key
from shardprep.formats.sources.metadata import ROW_COLUMNS, MetadataReader
from shardprep.formats.sources.source import (
    SPLIT_COLUMN,
    SPLITS,
    ByteReader,
    Entries,
    Listing,
    Problems,
    Source,
    SourceOptions,
    no_such_split,
    split_in,
    split_of,
)
from shardprep.formats.sources.tables import (
    CSV_SUFFIXES,
    JSON_SUFFIXES,
    MAX_ROW_BYTES,
    CellKind,
    FileStatus,
    Lines,
    ListedClasses,
    TableForm,
    TableRow,
    cell_kinds,
    left_out_note,
    place_below,
)
from shardprep.formats.sources.tar import archive_of
from shardprep.formats.sources.trees import FolderWalk, FoundFile, TreeReader, mtime_of

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
        return tuple(split for split in SPLITS if split in self._contents.of_split)

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
        contents, follow = self._contents, self.source_options.follow_symlinks
        one, rows = contents.of_split[split], contents.rows
        fields = tuple(kind.field for kind in rows.kinds.values())
        reader: ByteReader = TreeReader(self.root, follow)
        if rows.table and fields:
            images = TreeReader(self.root, follow, ("path", ROW_COLUMNS[0][0], "mtime_ns"))
            places = tuple(rows.kinds)
            reader = MetadataReader(images, self.path, contents.identity, rows.table, fields, places)
        return Listing(
            split=split,
            layout=LAYOUT,
            entries=one.entries,
            labels=contents.labels,
            reader=reader,
            archives=(archive_of(self.path),),
            expected=len(one.entries) + one.missing,
            shortfall=f"{count_of(one.missing, 'file')} missing, first {one.first_missing}"
            if one.missing
            else "",
            problems=contents.problems,
            ignored=dict(one.ignored),
            notes=left_out_note(rows.left_out),
            options=self.source_options.kept(
                "follow_symlinks", "skip_non_images", "path_column", "label_column", "columns"
            ),
            schema=Schema(fields),
        )

    @cached_property
    def _contents(self) -> _ListContents:
        contents = _ListContents(self)
        contents.read()
        return contents


class _SplitRows:
    """The images of one split of a list, and the files that are missing."""

    entries: Entries

    def __init__(self, table: EntryTable) -> None:
        self.table = table
        self.lines = array("q")
        self.missing = 0
        self.first_missing = ""
        self.ignored: Counter[str] = Counter()


class _ListContents:
    """Rows of a list, for each split; ``problems`` are those of all its rows."""

    identity: Identity
    labels: LabelSpace

    def __init__(self, source: LabelledList) -> None:
        self.problems = Problems()
        self.rows = ListRows()
        self.of_split: dict[str, _SplitRows] = {}
        self._classes = ListedClasses()
        self._source = source
        self._options = source.source_options

    def read(self) -> None:
        """Read all lines. Raises SourceDamaged, with the line, where the lines after it cannot be read."""
        source, follow = self._source, self._options.follow_symlinks
        with ArchiveFile(source.path) as file, FileStatus(source.root, follow_symlinks=follow) as files:
            self.identity = file.identity
            with self._at(lambda: 1):
                self.rows = ListRows.of(file, self._options)
            lines = Lines(file, MAX_ROW_BYTES) if self.rows.table else Lines(file)
            with self._at(lambda: lines.number):
                for row in self.rows.read(lines):
                    self._add(row, lines.number, files)
        if not self.of_split:  # no row is one
            self._rows_of(source.split)
        every = self.of_split.values()
        if (missing := sum(one.missing for one in every)) and not any(one.lines for one in every):
            first = next(one.first_missing for one in every if one.missing)
            none = f"none of its {missing} files exists; the first is {first}"
            advice = "give the folder that the paths are relative to with --root"
            self.problems.add(SourceIncomplete(f"{none}; {advice}", path=source.path))
            for one in every:
                one.missing = 0
        self.labels, places = self._classes.numbered()
        for one in every:
            one.entries = one.table.finish(one.lines)
            if len(one.entries):
                one.entries["label"] = places[one.entries["label"]]

    def _rows_of(self, split: str) -> _SplitRows:
        if split not in self.of_split:
            more = ROW_COLUMNS if self.rows.kinds else ()
            self.of_split[split] = _SplitRows(EntryTable(self._source.path, self.problems, more))
        return self.of_split[split]

    def _at(self, line: Callable[[], int]) -> AbstractContextManager[None]:
        return foreign_file(self._source.path, "correct the list", place=lambda: f"line {line()}: ")

    def _add(self, row: Row | ValueError, line: int, files: FileStatus) -> None:
        """Add a row; what is wrong with its label, its path and its cells are problems of their own."""
        label = place = None
        if isinstance(row, ValueError):
            with self.problems.collected("row"), self._at(lambda: line):
                raise row
            return
        line = row.row.line if row.row else line
        with self.problems.collected("label"), self._at(lambda: line):
            label = self._classes.label_of(row.label)
        with self.problems.collected("path"), self._at(lambda: line):
            place = place_below(row.path, self._source.roots)
        for at, kind in self.rows.kinds.items():
            with self.problems.collected("row"), self._at(lambda: line):
                kind.add(row.row.cells[at] if row.row else "")
        if label is not None and place is not None:
            with self.problems.collected():
                self._add_file(row, place, label, line, files.of(place))

    def _add_file(self, row: Row, place: str, label: int, line: int, status: os.stat_result | None) -> None:
        one = self._rows_of(row.split or self._source.split)
        if status is None:
            one.missing += 1
            one.first_missing = one.first_missing or f"{self._source.root / place} in line {line}"
            return
        file = FoundFile(place, status.st_size, mtime_of(status))
        if self._options.skip_non_images:
            walk = FolderWalk(self._source.root, self._options.follow_symlinks, self.problems, one.ignored)
            if walk.is_left_out(file):
                return
        kept = row.row if self.rows.kinds else None
        taken = one.table.append(
            record_key(place.partition("/")[0], place),
            label,
            length=file.size + (kept.length if kept else 0),
            path=place.encode(),
            offset=kept.offset if kept else 0,
            mtime_ns=file.mtime_ns,
            image_bytes=file.size,
            more=(file.size, kept.length) if kept else (),
        )
        if taken:
            one.lines.append(line)


class Row(NamedTuple):
    """One image as listed: its path, its label, its split if that is said, and its row in a table."""

    path: str
    label: str
    split: str | None = None
    row: TableRow | None = None


@dataclass
class ListRows:
    """The rows of a list.

    ``table`` is None for a text file. ``kinds`` are those of the columns that are taken, by their places in a
    row, and ``left_out`` has the names of the others, as far as the rows were read.
    """

    table: TableForm | None = None
    kinds: dict[int, CellKind] = field(default_factory=dict)
    left_out: dict[str, None] = field(default_factory=dict)
    _used: Sequence[str] = ()  # the columns of paths, labels and splits

    @classmethod
    def of(cls, file: ArchiveFile, options: SourceOptions) -> ListRows:
        """Return the rows of a file by its first line. Raises ValueError, and UsageError for a column."""
        suffix = file.path.suffix.lower()
        names_columns = bool(options.path_column or options.label_column or options.columns)
        if suffix in _JSON_SUFFIXES:
            return cls._of_json(TableForm.of_objects(file), options)
        if suffix not in CSV_SUFFIXES:
            if names_columns:
                raise ValueError(
                    "needs named columns, which a text file does not have; give a CSV or JSON Lines file"
                )
            return cls()
        form = TableForm.of(file, unique=False)
        names = tuple(name.strip() for name in form.names)
        if len(names) == 2 and "." in names[0] and not names_columns:
            usual = ("path", "label")
            return cls(TableForm(usual, form.delimiter, has_header=False), _used=usual)
        used = _used_columns(names, options)
        kinds = cell_kinds(names, options.column_choices, (), typed=False) if options.columns else {}
        taken = {*used, *(kind.header for kind in kinds.values())}
        if twice := next((name for name in taken if names.count(name) > 1), None):
            raise ValueError(f"has the column {twice!r} twice; rename one")
        left_out = dict.fromkeys(name for name in names if name and name not in taken)
        return cls(TableForm(names, form.delimiter), kinds, left_out, used)

    @classmethod
    def _of_json(cls, form: TableForm, options: SourceOptions) -> ListRows:
        if not form.names:  # no line is an object
            return cls(form)
        used, choices = _used_columns(form.names, options), options.column_choices
        cell_kinds(form.names, choices, (), typed=True)  # refuses columns that are not there
        names = tuple(dict.fromkeys((*used, *(choice.origin for choice in choices))))
        kinds = cell_kinds(names, choices, (), typed=True) if choices else {}
        return cls(TableForm(names, is_open=True), kinds, _used=used)

    def read(self, lines: Lines) -> Iterator[Row | ValueError]:
        """Yield the rows, and for a line that is none what is wrong with it.

        In a text file a line is a path and a label, separated by a tab, or else by the last space. Raises
        ValueError where the rows after it cannot be read.
        """
        if self.table is not None:
            for row in self.table.rows(lines):
                try:
                    yield row if isinstance(row, ValueError) else self._row(row)
                except ValueError as error:
                    yield error
            return
        for line in filter(None, map(str.strip, lines)):
            path, separator, label = line.partition("\t") if "\t" in line else line.rpartition(" ")
            if separator:
                yield Row(path.strip(), label.strip())
            else:
                yield ValueError(f"{line[:80]!r} is not a path and its label")

    @cached_property
    def _places(self) -> list[int]:
        return [self.table.names.index(name) for name in self._used] if self.table else []

    def _row(self, row: TableRow) -> Row:
        if row.others:
            self.left_out.update(dict.fromkeys(row.others))
        path, label, *split = (row.cells[at] for at in self._places)
        if not isinstance(path, str):
            raise ValueError(f"has no text under {self._used[0]!r}")
        if not isinstance(label, str) and type(label) is not int:
            raise ValueError(f"has no text or whole number under {self._used[1]!r}")
        if split and split_of(split[0]) is None:
            raise ValueError(
                f"has the {SPLIT_COLUMN} {str(split[0])[:80]!r}, an unknown split name (known are "
                f"{', '.join(SPLITS)}); correct it, or take the column as values with --column "
                f"NAME:KIND={self._used[2]}"
            )
        return Row(path.strip(), str(label).strip(), split_of(split[0]) if split else None, row)


def _used_columns(names: Sequence[str], options: SourceOptions) -> tuple[str, ...]:
    """Return the names of the columns of paths, of labels, and of splits, if there is one.

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
    return (*used, *[name for name in names if name.lower() == SPLIT_COLUMN and name not in taken][:1])
