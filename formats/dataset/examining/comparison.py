"""The comparison of a dataset with another one: classes, their shares, and what both have."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardprep.formats.dataset.dataset import Dataset

from .duplicates import Duplicates

MOST_CLASSES_LISTED = 20


@dataclass(frozen=True)
class ClassShares:
    """A class that both datasets have: its images in each, and its share of each."""

    name: str
    images: int
    other_images: int
    share: float
    other_share: float


@dataclass(frozen=True)
class Comparison:
    """What a dataset is beside another one.

    ``path``, ``split``, ``records`` and ``root`` are the other's. ``common_classes`` is the number of classes
    that both have, ``missing_there`` and ``missing_here`` how many only one has, and ``unbalanced`` the
    common classes with the largest ratio of their shares. ``equal_images`` is the number of images of which
    the other has the bytes, and ``similar_images`` of which it has similar ones, among those that were looked
    at."""

    path: str
    split: str
    records: int
    root: str
    common_classes: int
    missing_there: int
    missing_here: int
    unbalanced: list[ClassShares]
    equal_images: int
    similar_images: int


def comparison(dataset: Dataset, other: Dataset, across: Duplicates) -> Comparison:
    """Return the comparison of two datasets, of which ``across`` are the shared images."""
    mine, theirs = _shares(dataset), _shares(other)
    common = sorted(mine.keys() & theirs.keys())
    balance = [
        ClassShares(name, mine[name][0], theirs[name][0], mine[name][1], theirs[name][1]) for name in common
    ]
    balance.sort(key=lambda one: (-_ratio(one), one.name))
    return Comparison(
        path=os.fspath(other.path),
        split=other.manifest.split,
        records=len(other),
        root=other.manifest.root,
        common_classes=len(common),
        missing_there=len(mine.keys() - theirs.keys()),
        missing_here=len(theirs.keys() - mine.keys()),
        unbalanced=[one for one in balance if _ratio(one) > 1][:MOST_CLASSES_LISTED],
        equal_images=_images(across.exact["first"]),
        similar_images=_images(across.near["first"]),
    )


def _images(records: npt.NDArray[np.int64]) -> int:
    return len(np.unique(records))


def _shares(dataset: Dataset) -> dict[str, tuple[int, float]]:
    """Return the images of each class that has some, and their share of all."""
    labels = dataset.index["label"]
    counts = np.bincount(labels[labels >= 0], minlength=len(dataset.manifest.labels)).tolist()
    total = max(sum(counts), 1)
    return {
        each.name: (count, count / total)
        for each, count in zip(dataset.manifest.labels.classes, counts, strict=True)
        if count
    }


def _ratio(one: ClassShares) -> float:
    return max(one.share, one.other_share) / min(one.share, one.other_share)
