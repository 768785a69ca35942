"""The base of archives and image trees: annotation files, expected numbers and boxes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from shardprep.formats.errors import SourceIncomplete
from shardprep.formats.records.labels import LabelSpace
from shardprep.formats.sources.annotations.annotation_files import WANTED_FOR_VAL, AnnotationFiles
from shardprep.formats.sources.annotations.boxes import find_boxes, read_boxes
from shardprep.formats.sources.annotations.expected_count import expected_images, shortfall
from shardprep.formats.sources.annotations.ground_truth import GroundTruth, check_entries
from shardprep.formats.sources.listing.archive_md5 import archive_of, check_md5
from shardprep.formats.sources.listing.problems import Problems
from shardprep.formats.sources.listing.source import (
    Archive,
    Box,
    ByteReader,
    Entries,
    Listing,
    Source,
    no_such_split,
)
from shardprep.formats.sources.tar.remote.listed_archive import remote_archive_of
from shardprep.formats.sources.tar.remote.remote_file import RemoteFile


class Found(NamedTuple):
    """The entries, the reader and the archives of one split, and what was left out of it."""

    entries: Entries
    reader: ByteReader
    archives: tuple[Path | RemoteFile, ...] = ()
    ignored: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class IlsvrcSource(Source):
    """A source with annotation files beside its images.

    ``beside`` are the folders that were searched for annotations and boxes; ``check_md5`` reads every archive
    whole when a split of it is listed.
    """

    layout: str
    annotation_files: AnnotationFiles
    beside: tuple[Path, ...] = ()
    check_md5: bool = False
    official_packing: bool = False

    @cached_property
    @abstractmethod
    def labels(self) -> LabelSpace:
        """The label space of all splits."""

    @abstractmethod
    def find(self, split: str, problems: Problems) -> Found:
        """Return the entries of an existing split; those that cannot be used are added to ``problems``."""

    @property
    def place(self) -> Path | str | None:
        """Where files are looked for that lie beside the images, for errors."""
        return self.beside[0] if self.beside else None

    @property
    def options(self) -> Mapping[str, Any]:
        """The options that the manifest keeps."""
        return {}

    @property
    def description(self) -> str:
        devkit = " with devkit" if self.annotation_files.devkit else ""
        return f"{self.layout}: {', '.join(self.splits)}{devkit} ({self.labels.counted})"

    def survey(self, split: str) -> Listing:
        if split not in self.splits:
            raise no_such_split(split, self.splits)
        problems = Problems()
        found = self.find(split, problems)
        if split == "val":
            check_entries(found.entries, self.labels)
        expected = self.expected(split)
        return Listing(
            split=split,
            layout=self.layout,
            entries=found.entries,
            labels=self.labels,
            reader=found.reader,
            archives=self._archives(found.archives),
            expected=expected,
            shortfall=shortfall(split, found.entries, self.labels, self.annotation_files, expected),
            problems=problems,
            ignored=dict(found.ignored),
            options=self.options,
        )

    def expected(self, split: str) -> int | None:
        """Return the number of images that there should be, None if it is unknown."""
        return expected_images(
            split, self.labels, self.annotation_files, official_packing=self.official_packing
        )

    def boxes(self, split: str) -> Iterator[Box] | None:
        path = find_boxes(self.beside, split)
        return None if path is None else read_boxes(path)

    def ground_truth(self, *, flat: bool) -> GroundTruth:
        """Return the labels of val. Raises SourceIncomplete for a ``flat`` folder without any."""
        truth = self.annotation_files.ground_truth(self.labels)
        if flat and not truth.authorities:
            raise SourceIncomplete(
                "nothing says which class the val images are of; sort them into val/<class>/, put "
                f"{WANTED_FOR_VAL} beside them, or convert a list of paths and labels",
                path=self.place,
            )
        return truth

    def _archives(self, paths: tuple[Path | RemoteFile, ...]) -> tuple[Archive, ...]:
        devkit = self.annotation_files.devkit_path
        files = (*paths, devkit) if devkit and devkit.is_file() else paths
        return tuple(_archive(path, check=self.check_md5) for path in files)


def _archive(path: Path | RemoteFile, *, check: bool) -> Archive:
    if isinstance(path, RemoteFile):
        return remote_archive_of(path, check_md5=check)
    return check_md5(path) if check else archive_of(path)
