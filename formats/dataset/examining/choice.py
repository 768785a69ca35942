"""The choice of the images that are read: none, a bounded sample, or all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.formats.containers.table import Rows
from shardprep.formats.errors import UsageError

from .index_statistics import same_size

PIXELS = ("none", "sample", "all")
MOST_DECODED = 4096  # images of a sample
MOST_COMPARED = 8192  # further images, read for their digest


@dataclass(frozen=True)
class Choice:
    """The images of one dataset that are read: ``records`` in order, and whether each is decoded."""

    records: npt.NDArray[np.int64]
    is_decoded: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class LookedAt:
    """How much was looked at.

    ``pixels`` is "none", "sample" or "all", ``images`` the number of images of all datasets, ``seed`` that of
    the sample, ``decoded`` the number of images of which the pixels were looked at, ``compared`` the number
    of which bytes were compared, ``same_size`` the number of images that share their length, width and height
    with another, so that their bytes can be equal, and ``same_size_compared`` how many of these were read."""

    pixels: str
    images: int
    seed: int
    decoded: int
    compared: int
    same_size: int
    same_size_compared: int


def chosen(indexes: list[Rows], pixels: str, seed: int) -> tuple[list[Choice], LookedAt]:
    """Return which images of each dataset are read, and how much that is of all together.

    A sample is MOST_DECODED images of each dataset, or all of a smaller one, and those that may have equal
    bytes, up to MOST_COMPARED. Raises UsageError for unknown ``pixels``."""
    if pixels not in PIXELS:
        raise UsageError(f"unknown pixels {pixels!r}; known are {', '.join(PIXELS)}")
    candidates = same_size(indexes) if pixels != "none" else np.empty(0, np.int64)
    compared = candidates if pixels == "all" else candidates[:MOST_COMPARED]
    choices, start = [], 0
    for index in indexes:
        mine = compared[(compared >= start) & (compared < start + len(index))] - start
        choices.append(_chosen(len(index), mine, pixels, seed))
        start += len(index)
    decoded, read = sum(int(c.is_decoded.sum()) for c in choices), sum(len(c.records) for c in choices)
    found = {"same_size": len(candidates), "same_size_compared": len(compared)}
    return choices, LookedAt(pixels, sum(map(len, indexes)), seed, decoded, read, **found)


def _chosen(count: int, compared: npt.NDArray[Any], pixels: str, seed: int) -> Choice:
    most = {"none": 0, "sample": min(count, MOST_DECODED), "all": count}[pixels]
    decoded = (
        np.arange(count) if most == count else np.random.default_rng(seed).choice(count, most, replace=False)
    )
    records = np.union1d(decoded, compared)
    return Choice(records, np.isin(records, decoded))
