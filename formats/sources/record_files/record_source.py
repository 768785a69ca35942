"""The base of sources of records that lie in several files for each split."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from shardprep.formats.columns.schema import Schema
from shardprep.formats.errors import LabelConflict
from shardprep.formats.records.labels import LabelSpace
from shardprep.formats.sources.listing.archive_md5 import archive_of
from shardprep.formats.sources.listing.problems import Problems
from shardprep.formats.sources.listing.source import ByteReader, Entries, Listing, Source, no_such_split
from shardprep.formats.sources.listing.source_options import SourceOptions

from .classes import NumberedClasses
from .split_files import SplitFiles


@dataclass(frozen=True)
class Scanned:
    """What is in the files of one split; ``boxes`` have the numbers of their entries, None for no boxes."""

    entries: Entries
    reader: ByteReader
    problems: Problems
    classes: NumberedClasses
    schema: Schema = field(default_factory=Schema)
    has_images: bool = True
    boxes: npt.NDArray[np.void] | None = None


@dataclass(frozen=True)
class RecordSource(Source):
    """Records in files; a label is the same in all splits, and so are the classes."""

    LAYOUT: ClassVar[str]

    files: SplitFiles
    source_options: SourceOptions

    @abstractmethod
    def scan(self, split: str) -> Scanned:
        """Return what is in a split's files, with the problems of what cannot be listed."""

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self.files.of_split)

    @property
    def description(self) -> str:
        counts = (f"{split} in {_counted(len(files))}" for split, files in self.files.of_split.items())
        return f"{self.LAYOUT}: {', '.join(counts)}"

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders below the source that its files lie in."""
        places = (Path(name).parent for names in self.files.of_split.values() for name in names)
        return tuple(dict.fromkeys(self.files.top / place for place in places if place.name))

    def survey(self, split: str) -> Listing:
        found = self.scanned(split)
        shortfall = self.files.missing(split)
        is_first = split == self.splits[0]
        problems = Problems()
        problems.merge(self.files.problems if is_first else Problems())
        problems.merge(found.problems)
        return Listing(
            split=split,
            layout=self.LAYOUT,
            entries=found.entries,
            labels=self.labels,
            reader=found.reader,
            archives=tuple(archive_of(self.files.top / name) for name in self.files.of_split[split]),
            expected=0 if shortfall else None,
            shortfall=shortfall,
            problems=problems,
            ignored=dict(self.files.ignored) if is_first else {},
            options=self.source_options.kept("follow_symlinks"),
            schema=found.schema,
            has_images=found.has_images,
        )

    def scanned(self, split: str) -> Scanned:
        """Return what is in a split's files. Raises UsageError for a split that is not there."""
        if split not in self._scanned:
            raise no_such_split(split, self.splits)
        return self._scanned[split]

    @cached_property
    def _scanned(self) -> dict[str, Scanned]:
        return {split: self.scan(split) for split in self.splits}

    @cached_property
    def labels(self) -> LabelSpace:
        """The space of the labels in all splits. Raises LabelConflict if names disagree."""
        classes = NumberedClasses()
        for split, found in self._scanned.items():
            try:
                classes.merge(found.classes)
            except ValueError as error:
                raise LabelConflict(f"in {split}, {error}; correct the names", path=self.files.top) from error
        return classes.space()


def _counted(files: int) -> str:
    return f"{files} {'file' if files == 1 else 'files'}"
