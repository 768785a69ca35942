"""The number of images that a split should have, and which are missing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

import numpy as np

from shardprep.formats.records.labels import OFFICIAL_IMAGES, LabelSpace
from shardprep.formats.sources.listing.source import Entries

from .annotation_files import AnnotationFiles

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
