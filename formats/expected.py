"""How many images a split should have, and which are missing where it has not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

import numpy as np

from .evidence import Evidence
from .labels import LabelSpace
from .source import Entries

OFFICIAL_IMAGES = {"train": 1_281_167, "val": 50_000, "test": 100_000}
_NAMED = 3


def expected_images(
    split: str, space: LabelSpace, evidence: Evidence, *, official_packing: bool
) -> int | None:
    """The official number for the official classes, and for official archives that nobody explains."""
    if space.is_official or (official_packing and evidence.devkit is None):
        return OFFICIAL_IMAGES[split]
    return evidence.images(split, space)


def shortfall(
    split: str, entries: Entries, space: LabelSpace, evidence: Evidence, expected: int | None
) -> str:
    """A phrase that names what is missing or too much; empty where nothing is, or nobody can tell."""
    if expected in (None, len(entries)):
        return ""
    if split == "train":
        return _differing_classes(entries, space, evidence.train_images)
    named = evidence.val_images(space) if split == "val" else []
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
    more = [f"{len(wrong) - _NAMED} more classes differ"] if len(wrong) > _NAMED else []
    return ", ".join(wrong[:_NAMED] + more)


def _first_missing(entries: Entries, wanted: Iterable[str]) -> str:
    there = {PurePosixPath(key.decode()).stem for key in entries["key"].tolist()}
    missing = next((image for image in wanted if image not in there), None)
    return f"{missing} is missing" if missing else ""
