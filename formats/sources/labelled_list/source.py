"""The source of a list of images: files below a folder, each with its label."""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardprep.formats.errors import SourceIncomplete, UsageError
from shardprep.formats.records.labels import LabelSpace
from shardprep.formats.records.record import MAX_KEY_BYTES
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

from .file_status import FileStatus
from .lines import Lines
from .rows import ReadRows, Row, reader_of

LAYOUT = "image-list"
MAX_CLASSES = 100_000
MAX_NAME = 255  # characters of a class's name
_ADVICE = "correct the list"
_NUMBER = re.compile(r"[0-9]{1,18}", re.ASCII)


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
        self.classes = _Classes()
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
            place = _place(row.path, self._source.roots)
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


def _place(path: str, roots: Sequence[Path]) -> str:
    """Return the path of a file below the root, in its shortest form. Raises ValueError.

    ``roots`` are the names of the root in which an absolute path may begin.
    """
    if path.startswith("/"):
        root = next((root for root in roots if Path(path).is_relative_to(root)), None)
        if root is None:
            raise ValueError(f"{path[:200]!r} does not lie below {roots[0]}; give another --root")
        path = str(Path(path).relative_to(root))
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise ValueError(f"{path[:200]!r} may lead out of the folder; write it without ..")
    place = "/".join(parts)
    if not place or "\0" in place:
        raise ValueError("names no file")
    if len(place.encode()) > MAX_KEY_BYTES:
        raise ValueError(f"has a path of more than {MAX_KEY_BYTES} bytes")
    return place


class _Classes:
    """The classes of a list, numbered as they come. Raises ValueError for what cannot be one."""

    def __init__(self) -> None:
        self._of_name: dict[str, int] = {}
        self._are_numbers: bool | None = None

    def label_of(self, text: str) -> int:
        """Return the number of the class in the order of first occurrence."""
        is_number = _NUMBER.fullmatch(text) is not None
        if not 0 < len(text) <= MAX_NAME:
            raise ValueError(f"has a label of {len(text)} characters, not 1 to {MAX_NAME}")
        if self._are_numbers not in (None, is_number):
            expected = "a number" if self._are_numbers else "a name"
            raise ValueError(f"has the label {text!r}, but the first one is {expected}; use one of both")
        if is_number and int(text) >= MAX_CLASSES:
            raise ValueError(f"has the label {text}, but the largest is {MAX_CLASSES - 1}; use names")
        text.encode()
        self._are_numbers = is_number
        label = self._of_name.setdefault(str(int(text)) if is_number else text, len(self._of_name))
        if label >= MAX_CLASSES:
            raise ValueError(f"has the class {text!r}, which is one more than {MAX_CLASSES}")
        return label

    def numbered(self) -> tuple[LabelSpace, np.ndarray[tuple[int], np.dtype[np.int32]]]:
        """Return the space of all classes, and the label in it of each class as it came."""
        if self._are_numbers:
            numbers = [int(text) for text in self._of_name]
            names = (f"{number:05d}" for number in range(1 + max(numbers)))
            return LabelSpace.of(names), np.array(numbers, np.int32)
        space = LabelSpace.of(self._of_name)
        return space, np.array([space.label_of[name] for name in self._of_name], np.int32)
