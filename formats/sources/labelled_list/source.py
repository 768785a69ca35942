"""The source of a list of images: files below a folder, each with its label."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from shardprep.formats.errors import SourceIncomplete, UsageError
from shardprep.formats.sources.listing.archive_md5 import archive_of
from shardprep.formats.sources.listing.entry_table import EntryTable, record_key
from shardprep.formats.sources.listing.problems import Problems
from shardprep.formats.sources.listing.source import SPLITS, Listing, Source, no_such_split
from shardprep.formats.sources.listing.source_options import SourceOptions
from shardprep.formats.sources.listing.tree_files import mtime_of
from shardprep.formats.sources.listing.tree_reader import TreeReader
from shardprep.formats.system.foreign_file import foreign_file
from shardprep.formats.system.regular_file import ArchiveFile
from shardprep.formats.system.user_path import user_path

from .classes import ListedClasses
from .file_status import FileStatus, place_below
from .lines import Lines
from .rows import ReadRows, Row, reader_of

LAYOUT = "image-list"
_ADVICE = "correct the list"


def labelled_list(path: Path, split: str | None, options: SourceOptions) -> LabelledList | None:
    """Return the source of a list, taken for ``split``, or for that of its name, or for train; else None.

    Raises UsageError if the root is no folder.
    """
    reader = reader_of(path, options)
    if reader is None or not path.is_file():
        return None
    split = split or (path.stem if path.stem in SPLITS else "train")
    root = (path.parent if options.root is None else user_path(options.root)).resolve()
    if not root.is_dir():
        raise UsageError("is not a folder", path=root)
    return LabelledList(path, split, root, options, reader)


@dataclass(frozen=True)
class LabelledList(Source):
    """A list of files below ``root`` with their labels.

    The classes of whole numbers are named for them, such as ``00042``, so each label stays the same. Classes
    of names are numbered in the order of their names.
    """

    path: Path
    split: str
    root: Path
    source_options: SourceOptions
    reader: ReadRows

    @property
    def splits(self) -> tuple[str, ...]:
        return (self.split,)

    @property
    def roots(self) -> tuple[Path, ...]:
        """The root, without links and as it was given."""
        given = self.source_options.root
        return (self.root,) if given is None else (self.root, user_path(given).absolute())

    @property
    def description(self) -> str:
        return f"{LAYOUT}: {self.split}, with files below {self.root}"

    def survey(self, split: str) -> Listing:
        if split != self.split:
            raise no_such_split(split, self.splits)
        contents = _ListContents(self)
        with ArchiveFile(self.path) as file:
            contents.read(Lines(file))
        entries = contents.table.finish(contents.lines)
        labels, places = contents.classes.numbered()
        if len(entries):
            entries["label"] = places[entries["label"]]
        return Listing(
            split=split,
            layout=LAYOUT,
            entries=entries,
            labels=labels,
            reader=TreeReader(self.root, self.source_options.follow_symlinks),
            archives=(archive_of(self.path),),
            expected=len(entries) + contents.missing,
            shortfall=contents.shortfall,
            problems=contents.problems,
            options=self.source_options.kept("follow_symlinks", "path_column", "label_column"),
        )


class _ListContents:
    """The images of a list as read so far."""

    def __init__(self, source: LabelledList) -> None:
        self.problems = Problems()
        self.table = EntryTable(source.path, self.problems)
        self.lines = array("q")
        self.classes = ListedClasses()
        self.missing = 0
        self.shortfall = ""
        self._source = source

    def read(self, lines: Lines) -> None:
        """Read all lines. Raises SourceDamaged, with the line, where the lines after it cannot be read."""
        follow = self._source.source_options.follow_symlinks
        with FileStatus(self._source.root, follow_symlinks=follow) as files:
            for row in self._rows(lines):
                self._add(row, lines, files)
        if self.missing and not self.lines:
            self._refuse_root()
        elif self.missing:
            self.shortfall = f"{self.missing} files are missing, the first is {self.shortfall}"

    def _refuse_root(self) -> None:
        self.problems.add(
            SourceIncomplete(
                f"none of its {self.missing} files is there, the first is {self.shortfall}; say with --root where "
                "the paths begin",
                path=self._source.path,
            )
        )
        self.missing, self.shortfall = 0, ""

    def _rows(self, lines: Lines) -> Iterator[Row]:
        """Yield the rows; lines that are none are added to the problems."""
        with self._at(lines):
            for row in self._source.reader(lines, self._source.source_options):
                if isinstance(row, Row):
                    yield row
                else:
                    self._add_wrong(row, lines)

    def _add_wrong(self, error: ValueError, lines: Lines) -> None:
        with self.problems.collected("row"), self._at(lines):
            raise error

    def _at(self, lines: Lines) -> AbstractContextManager[None]:
        return foreign_file(self._source.path, _ADVICE, place=lambda: f"line {lines.number}: ")

    def _add(self, row: Row, lines: Lines, files: FileStatus) -> None:
        label = place = None
        with self.problems.collected("label"), self._at(lines):
            label = self.classes.label_of(row.label)
        with self.problems.collected("path"), self._at(lines):
            place = place_below(row.path, self._source.roots)
        if label is not None and place is not None:
            with self.problems.collected():
                self._add_file(place, label, lines.number, files.of(place))

    def _add_file(self, place: str, label: int, line: int, status: os.stat_result | None) -> None:
        if status is None:
            self.missing += 1
            self.shortfall = self.shortfall or f"{self._source.root / place} in line {line}"
            return
        taken = self.table.append(
            record_key(place.partition("/")[0], place),
            label,
            length=status.st_size,
            path=place.encode(),
            mtime_ns=mtime_of(status),
        )
        if taken:
            self.lines.append(line)
