"""How many images a split should have, and which are missing where it has not."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count

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
    return evidence.images(split)


def shortfall(split: str, entries: Entries, space: LabelSpace, per_class: Mapping[str, int]) -> str:
    """A phrase that names what is missing or too much; empty where that cannot be told.

    ``per_class`` is how many training images each class should have, empty where nobody says.
    """
    return _differing_classes(entries, space, per_class) if split == "train" else _first_gap(entries)


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


def _first_gap(entries: Entries) -> str:
    """The first official number that is skipped, if one is."""
    keys = {key for key in entries["key"].tolist() if key.startswith(b"ILSVRC2012_")}
    numbers = {int(key[-8:]) for key in keys}
    missing = next(number for number in count(1) if number not in numbers)
    if missing > len(numbers):
        return ""
    return f"{min(keys)[:-8].decode()}{missing:08d} is missing"
