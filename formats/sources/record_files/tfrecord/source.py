"""The source of TFRecord files, read in place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import SourceDamaged
from shardprep.formats.sources.listing.source import Box, Entries
from shardprep.formats.sources.listing.source_options import SourceOptions
from shardprep.formats.sources.listing.text_file import read_small_file, text_lines
from shardprep.formats.sources.record_files.record_source import RecordSource, Scanned
from shardprep.formats.sources.record_files.split_files import SplitFiles, split_files
from shardprep.formats.system.foreign_file import foreign_file
from shardprep.formats.system.regular_file import ArchiveFile

from .contents import ExampleContents
from .dialect import Dialect, dialect_of
from .example import features
from .frames import begins_with_frame, frames
from .reader import ExampleReader
from .wire import ByteWindow

_NAMES = ".labels.txt"
_NAMED = r".+\.tfrec(?:ords?)?(?:-\d+-of-\d+)?"
_FILE = re.compile(rf"{_NAMED}|.+-\d+-of-\d+", re.DOTALL | re.ASCII)


def tfrecord(path: Path, split: str | None, options: SourceOptions) -> TfRecord | None:
    """Return the source of the TFRecord files at a path, or in the folder there; None if there are none.

    A file without ``.tfrecord`` in its name begins with a record. Raises UsageError, OSError.
    """
    files = split_files(path, split, _FILE, follow_symlinks=options.follow_symlinks)
    if files is None:
        return None
    first = next(iter(files.of_split.values()))[0]
    if not re.fullmatch(_NAMED, first, re.DOTALL | re.ASCII) and not begins_with_frame(files.top / first):
        return None
    return TfRecord(files, options, _dialect(files))


def _dialect(files: SplitFiles) -> Dialect:
    """Return the dialect of the first record that can be read."""
    for name in (name for names in files.of_split.values() for name in names):
        try:
            with ArchiveFile(files.top / name) as file:
                for frame in frames(file):
                    end = frame.data + frame.length
                    return dialect_of(features(ByteWindow(file.read_at, end), frame.data, end))
        except (SourceDamaged, ValueError):  # said with all other problems
            continue
    return Dialect()


@dataclass(frozen=True)
class TfRecord(RecordSource):
    """TFRecord files of tf.train.Example.

    A record's key is the name of its image's file without extension, where each has one and no two the same;
    else that of the TFRecord file with the record's number.
    """

    LAYOUT: ClassVar[str] = "tfrecord"

    dialect: Dialect

    @property
    def description(self) -> str:
        counted_from = self.dialect.first_label
        return super().description + (", labels from 1 stored from 0" if counted_from else "")

    def scan(self, split: str) -> Scanned:
        contents = ExampleContents(self.files, self.dialect)
        self._add_names(contents)
        for name in self.files.of_split[split]:
            with contents.problems.collected():
                contents.read(name)
        schema = contents.schema()
        return Scanned(
            entries=contents.table.finish(may_number=True),
            reader=ExampleReader(self.files.top, schema, self.dialect.image),
            problems=contents.problems,
            classes=contents.classes,
            schema=schema,
            has_images=bool(self.dialect.image),
            boxes=contents.boxes(),
        )

    def _add_names(self, contents: ExampleContents) -> None:
        """Add the names of the classes, which TensorFlow Datasets writes beside the files."""
        path = self.files.top / f"{self.dialect.label.replace('/', '-')}{_NAMES}"
        if path.is_file():
            with contents.problems.collected(), foreign_file(path, "correct the list"):
                for label, name in enumerate(text_lines(read_small_file(path), path)):
                    contents.classes.add(label, name)

    def boxes(self, split: str) -> Iterator[Box] | None:
        found = self.scanned(split)
        return None if found.boxes is None else self._boxes(found.boxes, found.entries)

    def _boxes(self, boxes: npt.NDArray[np.void], entries: Entries) -> Iterator[Box]:
        names = [each.name for each in self.labels.classes]
        keys = entries["key"]
        for row, label, *sides in boxes[np.argsort(keys[boxes["row"]], kind="stable")].tolist():
            name = names[label] if 0 <= label < len(names) else ""
            yield Box(keys[row].decode(), name, *sides)
