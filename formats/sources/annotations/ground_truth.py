"""The classes of the validation images: every file with labels is read, and all must agree."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from shardprep.formats.errors import LabelConflict, SourceDamaged
from shardprep.formats.records.labels import LabelSpace
from shardprep.formats.sources.listing.source import Entries
from shardprep.formats.sources.listing.text_file import read_small_file, text_lines
from shardprep.formats.system.foreign_file import foreign_file

from .devkit import FORMS, Devkit

VAL_IMAGES = 50_000
FIRST_VAL = "ILSVRC2012_val_00000001"
FIRST_VAL_ID, FIRST_VAL_LABEL = 490, 65  # n01751748, sea snake: distinguishes ids from labels

_ADVICE = "download it again"
_CAFFE_LINE = re.compile(r"(?:.*/)?(ILSVRC2012_val_\d{8})\.JPEG (\d{1,9})", re.ASCII)


@dataclass(frozen=True)
class Authority:
    """A file with labels: its name, and the labels in sorted_wnid0 by image name (stem)."""

    name: str
    labels: Mapping[str, int]


@dataclass(frozen=True)
class GroundTruth:
    """The labels of all authorities."""

    authorities: tuple[Authority, ...]
    space: LabelSpace

    def label_of(self, image: str, folder: str | None = None) -> int:
        """Return the label of an image by its stem; ``folder`` is the class of its folder, if any.

        Raises LabelConflict with every authority's label unless all have one and agree.
        """
        by_authority = {authority.name: authority.labels.get(image) for authority in self.authorities}
        if folder is not None:
            by_authority["its folder"] = self.space.label_of[folder]
        labels = set(by_authority.values())
        label = labels.pop() if len(labels) == 1 else None
        if label is None:
            said = ", ".join(f"{name} says {self._class(label)}" for name, label in by_authority.items())
            raise LabelConflict(f"{said}; remove what is wrong", key=image)
        return label

    def _class(self, label: int | None) -> str:
        return "nothing" if label is None else f"{self.space.classes[label].name} ({label})"


def devkit_authority(devkit: Devkit, space: LabelSpace) -> Authority:
    """Return the devkit's ground truth: line *i* is for the validation image with number *i*.

    ``space`` is the devkit's, as always if a devkit was found.
    """
    truth = devkit.ground_truth
    if space.is_official and len(truth) == VAL_IMAGES and truth[0] != FIRST_VAL_ID:
        raise LabelConflict(
            f"the devkit says {truth[0]}, but its id is {FIRST_VAL_ID}; download {FORMS[0]} again",
            key=FIRST_VAL,
        )
    label_of = space.label_of_id
    named = ((f"ILSVRC2012_val_{i:08d}", label_of[number]) for i, number in enumerate(truth, start=1))
    return Authority("the devkit", dict(named))


def kaggle_authority(path: Path, space: LabelSpace) -> Authority:
    """Read ``LOC_val_solution.csv``: the first word of an image's prediction string is its wnid."""
    with foreign_file(path, _ADVICE):
        return Authority(path.name, _unique(_kaggle_labels(_rows(path), path, space), path))


def _rows(path: Path) -> Iterator[list[str]]:
    """Yield the rows after the header. Raises ValueError."""
    rows = csv.reader(text_lines(read_small_file(path), path))
    try:
        if next(rows, None) != ["ImageId", "PredictionString"]:
            raise ValueError("does not begin with ImageId,PredictionString")
        yield from rows
    except csv.Error as error:
        raise ValueError(f"is no CSV file ({error})") from error


def _kaggle_labels(rows: Iterable[list[str]], path: Path, space: LabelSpace) -> Iterator[tuple[str, int]]:
    for row in rows:
        wnid = row[1].partition(" ")[0] if len(row) == 2 else ""
        if not wnid:
            raise ValueError(f"the row {','.join(row)!r} names no class")
        if wnid not in space.label_of:
            raise LabelConflict(f"says {wnid}, which is none of the classes", path=path, key=row[0])
        yield row[0], space.label_of[wnid]


def is_caffe_list(path: Path) -> bool:
    """Whether this val.txt is Caffe's, because other datasets have a file of that name, too."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return _CAFFE_LINE.fullmatch(file.readline(4096).decode(errors="replace").strip()) is not None


def caffe_authority(path: Path, space: LabelSpace) -> Authority:
    """Read Caffe's ``val.txt``, with an image and its label in sorted_wnid0 per line."""
    with foreign_file(path, _ADVICE):
        return Authority(path.name, _unique(_caffe_labels(path, space), path))


def _caffe_labels(path: Path, space: LabelSpace) -> Iterator[tuple[str, int]]:
    for line in text_lines(read_small_file(path), path):
        match = _CAFFE_LINE.fullmatch(line.strip())
        if match is None:
            raise ValueError(f"the line {line!r} is no image and its label")
        if int(match[2]) >= len(space):
            raise LabelConflict(
                f"says {match[2]}, but there are {len(space)} classes", path=path, key=match[1]
            )
        yield match[1], int(match[2])


def _unique(labels: Iterable[tuple[str, int]], path: Path) -> dict[str, int]:
    unique: dict[str, int] = {}
    for image, label in labels:
        if image in unique:
            raise SourceDamaged(f"names this image twice; {_ADVICE}", path=path, key=image)
        unique[image] = label
    return unique


def check_sentinel(space: LabelSpace, *, images: int, first: int | None, said_by: str) -> None:
    """Raise LabelConflict if the official validation images have labels of another space.

    ``first`` is the label of the first image, None if it is missing.
    """
    if space.is_official and images == VAL_IMAGES and first not in (FIRST_VAL_LABEL, None):
        raise LabelConflict(
            f"{said_by} says {first}, but in sorted_wnid0 it is {FIRST_VAL_LABEL}; "
            "the labels are of another space, or of other images",
            key=FIRST_VAL,
        )


def check_entries(entries: Entries, space: LabelSpace) -> None:
    """Check the labels of a listing in the same way."""
    first = entries["label"][entries["key"] == FIRST_VAL.encode()].tolist()
    check_sentinel(space, images=len(entries), first=first[0] if first else None, said_by="the source")
