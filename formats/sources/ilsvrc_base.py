"""The base of ILSVRC12's archives and image trees: annotation files, and numbers of images to expect."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from shardprep.formats.errors import SourceIncomplete
from shardprep.formats.records.labels import OFFICIAL_IMAGES, LabelSpace
from shardprep.formats.sources.annotations import (
    WANTED_FOR_VAL,
    AnnotationFiles,
    GroundTruth,
    check_entries,
    find_boxes,
    read_boxes,
)
from shardprep.formats.sources.remote_tar import remote_archive_of
from shardprep.formats.sources.source import (
    Archive,
    Box,
    ByteReader,
    Entries,
    Listing,
    Problems,
    Source,
    no_such_split,
)
from shardprep.formats.sources.tar import archive_of, check_md5
from shardprep.formats.storage.archive import RemoteFile

_MAX_NAMED = 3


def expected_images(
    split: str, space: LabelSpace, annotation_files: AnnotationFiles, *, official_packing: bool
) -> int | None:
    """Return the official number for the official classes and for official archives without a devkit.

    For other classes it is the number in the annotation files, None if these do not state it.
    """
    if space.is_official or (official_packing and annotation_files.devkit is None):
        return OFFICIAL_IMAGES[split]
    return annotation_files.images(split, space)


def shortfall(
    split: str, entries: Entries, space: LabelSpace, annotation_files: AnnotationFiles, expected: int | None
) -> str:
    """Return a phrase that names missing or extra images; empty if there are none or it is unknown."""
    if expected in (None, len(entries)):
        return ""
    if split == "train":
        return _differing_classes(entries, space, annotation_files.train_images)
    named = annotation_files.val_images(space) if split == "val" else []
    official = (f"ILSVRC2012_{split}_{number:08d}" for number in range(1, expected + 1))
    return _first_missing(entries, named if len(named) == expected else official)


def _differing_classes(entries: Entries, space: LabelSpace, per_class: Mapping[str, int]) -> str:
    found = np.bincount(entries["label"], minlength=len(space)).tolist()
    pairs = [(c.name, have, per_class.get(c.name)) for c, have in zip(space.classes, found, strict=True)]
    wrong = [
        f"{name} has {have}" if want is None else f"{name} has {have} of {want}"
        for name, have, want in pairs
        if (not have if want is None else have != want)
    ]
    more = [f"{len(wrong) - _MAX_NAMED} more classes differ"] if len(wrong) > _MAX_NAMED else []
    return ", ".join(wrong[:_MAX_NAMED] + more)


def _first_missing(entries: Entries, wanted: Iterable[str]) -> str:
    there = {PurePosixPath(key.decode()).stem for key in entries["key"].tolist()}
    missing = next((image for image in wanted if image not in there), None)
    return f"{missing} is missing" if missing else ""


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
    def notes(self) -> tuple[str, ...]:
        """Lines about what is left out."""
        return ()

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
            notes=self.notes,
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
                "nothing says which classes the val images belong to; sort them into val/<class>/, put "
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
