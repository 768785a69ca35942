"""What all recognised sources have in common: evidence, expectation, boxes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from .boxes import find_boxes, read_boxes
from .errors import SourceIncomplete, UsageError
from .evidence import WANTED_FOR_VAL, Evidence
from .expected import expected_images, shortfall
from .ground_truth import GroundTruth, check_entries
from .labels import LabelSpace
from .official_archives import archive_of, check_md5
from .source import Archive, Box, ByteReader, Entries, Listing, Source


class Found(NamedTuple):
    """What a source found of one split."""

    entries: Entries
    reader: ByteReader
    archives: tuple[Path, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RecognisedSource(Source):
    """``beside`` are the folders where evidence and boxes were looked for; ``check_md5`` reads
    every archive whole when a split of it is listed.
    """

    layout: str
    evidence: Evidence
    beside: tuple[Path, ...] = ()
    check_md5: bool = False
    official_packing: bool = False

    @cached_property
    @abstractmethod
    def labels(self) -> LabelSpace:
        """The label space of all splits."""

    @abstractmethod
    def find(self, split: str) -> Found:
        """The entries of a split that is there."""

    @property
    def description(self) -> str:
        devkit = " with devkit" if self.evidence.devkit else ""
        return f"{self.layout}: {', '.join(self.splits)}{devkit} ({len(self.labels)} classes)"

    def listing(self, split: str) -> Listing:
        if split not in self.splits:
            raise no_such_split(split, self.splits)
        found = self.find(split)
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
            shortfall=shortfall(split, found.entries, self.labels, self.evidence, expected),
        )

    def expected(self, split: str) -> int | None:
        """How many images there should be, None where nobody says."""
        return expected_images(split, self.labels, self.evidence, official_packing=self.official_packing)

    def boxes(self, split: str) -> Iterator[Box] | None:
        path = find_boxes(self.beside, split)
        return None if path is None else read_boxes(path)

    def ground_truth(self, *, flat: bool) -> GroundTruth:
        """Who knows the labels of val. Raises SourceIncomplete where a ``flat`` folder has nobody."""
        truth = self.evidence.ground_truth(self.labels)
        if flat and not truth.authorities:
            raise SourceIncomplete(
                f"nothing says which class the val images are of; put {WANTED_FOR_VAL} beside them",
                path=self.beside[0] if self.beside else None,
            )
        return truth

    def _archives(self, paths: tuple[Path, ...]) -> tuple[Archive, ...]:
        devkit = self.evidence.devkit_path
        files = (*paths, devkit) if devkit and devkit.is_file() else paths
        return tuple(check_md5(path) if self.check_md5 else archive_of(path) for path in files)


def no_such_split(split: str, splits: tuple[str, ...]) -> UsageError:
    return UsageError(f"the source has no split {split!r}, only {', '.join(splits)}")
