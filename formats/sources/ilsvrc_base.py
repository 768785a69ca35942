"""The base of ILSVRC12's archives and image trees: annotation files, and numbers of images to expect."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

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
    Entries,
    Listing,
    Problems,
    Source,
    no_such_split,
)
from shardprep.formats.sources.tar import archive_of, check_md5
from shardprep.formats.storage.archive import RemoteFile

_MAX_NAMED = 3


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
    def find(self, split: str, problems: Problems) -> Listing:
        """Return the entries, the reader and the archives of an existing split, and what was left out of it.

        Entries that cannot be used are added to ``problems``. :meth:`survey` adds what all sources have.
        """

    @abstractmethod
    def archives(self, split: str) -> tuple[Path | RemoteFile, ...]:
        """Return the archives of a split."""

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
        found = self.find(split, Problems())
        if split == "val":
            check_entries(found.entries, self.labels)
        expected = self.expected(split)
        differs = expected is not None and expected != len(found.entries)
        devkit = self.annotation_files.devkit_path
        archives = (*self.archives(split), *([devkit] if devkit and devkit.is_file() else []))
        return replace(
            found,
            archives=tuple(self._archive(path) for path in archives),
            expected=expected,
            shortfall=self._shortfall(split, found.entries, expected or 0) if differs else "",
            notes=self.notes,
            options=self.options,
        )

    def expected(self, split: str) -> int | None:
        """Return the number of images that there should be, None if it is unknown.

        It is the official number for the official classes and for official archives without a devkit, and
        that in the annotation files for others.
        """
        if self.labels.is_official or (self.official_packing and self.annotation_files.devkit is None):
            return OFFICIAL_IMAGES[split]
        return self.annotation_files.images(split, self.labels)

    def _shortfall(self, split: str, entries: Entries, expected: int) -> str:
        """Return a phrase that names missing or extra images; empty if it is unknown which."""
        if split == "train":
            return self._differing_classes(entries)
        named = self.annotation_files.val_images(self.labels) if split == "val" else []
        official = (f"ILSVRC2012_{split}_{number:08d}" for number in range(1, expected + 1))
        there = {PurePosixPath(key.decode()).stem for key in entries["key"].tolist()}
        wanted = named if len(named) == expected else official
        missing = next((image for image in wanted if image not in there), None)
        return f"{missing} is missing" if missing else ""

    def _differing_classes(self, entries: Entries) -> str:
        per_class, wrong = self.annotation_files.train_images, []
        found = np.bincount(entries["label"], minlength=len(self.labels)).tolist()
        for one, have in zip(self.labels.classes, found, strict=True):
            want = per_class.get(one.name)
            if not have if want is None else have != want:
                wrong.append(f"{one.name} has {have}" + ("" if want is None else f" of {want}"))
        more = [f"{len(wrong) - _MAX_NAMED} more classes differ"] if len(wrong) > _MAX_NAMED else []
        return ", ".join(wrong[:_MAX_NAMED] + more)

    def _archive(self, path: Path | RemoteFile) -> Archive:
        if isinstance(path, RemoteFile):
            return remote_archive_of(path, check_md5=self.check_md5)
        return check_md5(path) if self.check_md5 else archive_of(path)

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
