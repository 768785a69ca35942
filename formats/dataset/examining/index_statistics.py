"""Statistics from the columns of the index alone: no image is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.formats.containers.table import Rows
from shardprep.formats.images.kinds.image_info import EXTREME_ASPECT, KINDS, ImageFlag

MOST_POINTS = 1000  # of a scatter plot
BINS = 32
TINY = 32  # pixels of the shorter side

Edges = list[float]


@dataclass(frozen=True)
class Histogram:
    """The number of values between each two ``edges``: ``counts`` [n] for ``edges`` [n + 1]."""

    edges: list[float]
    counts: list[int]

    @classmethod
    def of(cls, values: npt.NDArray[Any], *, is_logarithmic: bool = False) -> Histogram:
        """Return the histogram of positive numbers; the edges of a logarithmic one have equal ratios.

        Of values that are all the same it is one bar.
        """
        if not len(values):
            return cls([0.0, 1.0], [0])
        low, high = float(values.min()), float(values.max())
        if low == high:
            return cls([round(low, 3)] * 2, [len(values)])
        edges = np.geomspace(low, high, BINS + 1) if is_logarithmic else np.linspace(low, high, BINS + 1)
        edges = np.maximum.accumulate(np.clip(edges, low, high))  # not so where they are rounded
        edges[0], edges[-1] = low, high
        return cls([round(edge, 3) for edge in edges.tolist()], np.histogram(values, edges)[0].tolist())


@dataclass(frozen=True)
class IndexStatistics:
    """What the index says of the images.

    ``class_sizes``, ``width``, ``height`` (pixels), ``bytes`` and ``aspect`` (width / height) are histograms.
    ``sides`` are (width, height) and ``weights`` (pixels, bytes) of a seeded sample of at most MOST_POINTS
    images."""

    class_sizes: Histogram
    width: Histogram
    height: Histogram
    bytes: Histogram
    aspect: Histogram
    sides: list[tuple[int, int]]
    weights: list[tuple[int, int]]


def index_statistics(index: Rows, classes: int, seed: int) -> IndexStatistics:
    """Return the statistics of an index of images with labels of so many classes.

    Beside the index this takes a few columns of memory, 8 bytes a record each.
    """
    sizes = np.bincount(index["label"][index["label"] >= 0], minlength=classes)
    chosen = np.sort(_sample(len(index), MOST_POINTS, seed))
    width, height, length = (index[name][chosen].astype(np.int64) for name in ("width", "height", "length"))
    return IndexStatistics(
        class_sizes=Histogram.of(sizes),
        width=Histogram.of(index["width"]),
        height=Histogram.of(index["height"]),
        bytes=Histogram.of(index["length"], is_logarithmic=True),
        aspect=Histogram.of(index["width"] / np.maximum(index["height"], 1), is_logarithmic=True),
        sides=list(zip(width.tolist(), height.tolist(), strict=True)),
        weights=list(zip((width * height).tolist(), length.tolist(), strict=True)),
    )


def odd_records(index: Rows) -> dict[str, npt.NDArray[np.int64]]:
    """Return the record numbers of unusual images by property; an image may have several."""
    flags, width, height = index["flags"], index["width"].astype(np.int64), index["height"].astype(np.int64)
    is_jpeg = flags & sum(KINDS.values()) == 0
    found = {
        "CMYK": (index["components"] == 4) & is_jpeg,
        "EXIF orientation": index["orientation"] != 1,
        "corrupt EXIF": (flags & ImageFlag.CORRUPT_EXIF) != 0,
        "tiny": np.minimum(width, height) < TINY,
        "extreme aspect": np.maximum(width, height) > EXTREME_ASPECT * np.minimum(width, height),
        "several frames": (flags & ImageFlag.SEVERAL) != 0,
        "trailing bytes": (flags & ImageFlag.TRAILING_BYTES) != 0,
    }
    return {name: np.flatnonzero(mask) for name, mask in found.items()}


def same_size(indexes: list[Rows]) -> npt.NDArray[np.int64]:
    """Return the numbers, over all indexes, of images of which another has the same length, width and height.

    Only these can have equal bytes. Those of small groups come first: of pairs, then of three, and so on.
    """
    columns = [np.concatenate([index[name] for index in indexes]) for name in ("height", "width", "length")]
    order = np.lexsort(columns)
    is_new = np.ones(len(order), bool)
    is_new[1:] = np.any([column[order][1:] != column[order][:-1] for column in columns], axis=0)
    sizes = np.diff(np.append(np.flatnonzero(is_new), len(order)))
    per_record = np.repeat(sizes, sizes)
    shared = per_record > 1
    return order[shared][np.argsort(per_record[shared], kind="stable")]


def _sample(count: int, most: int, seed: int) -> npt.NDArray[np.int64]:
    """Return at most so many numbers below ``count``, none twice; all of them if they are not more."""
    return np.random.default_rng(seed).choice(count, min(count, most), replace=False)
