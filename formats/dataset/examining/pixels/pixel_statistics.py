"""Statistics over the pixels of images, which are merged exactly, in any order."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from .measures import MEAN_SIDE, Measures

MOST_EXTREMES = 12
MOST_DAMAGED = 200  # images that are named; all are counted

MEASURES: dict[str, npt.NDArray[np.float64]] = {
    "brightness": np.linspace(0, 256, 33),
    "contrast": np.linspace(0, 128, 33),
    "sharpness": np.concatenate([[0.0], np.geomspace(1, 1 << 16, 33)]),
}
"""The edges of each histogram; what is above the last is counted in the last bar."""

EXTREMES: dict[str, tuple[str, int]] = {
    "brightest": ("brightness", -1),
    "darkest": ("brightness", 1),
    "flattest": ("contrast", 1),
    "blurriest": ("sharpness", 1),
}
"""What each list of extremes is sorted by, and whether the least (1) or the largest (-1) come first."""

CODES = np.dtype([("record", "<i8"), ("digest", "<u8"), ("hash", "<u8"), ("is_hashed", "?")])
"""A row for each image that was read: its digest and, if decoded and not flat, its perceptual hash."""

Extreme = tuple[float, int]


@dataclass
class PixelStatistics:
    """The statistics of images of one dataset, each named by its record number.

    ``images`` is the number of decoded images, and ``small_sum`` uint64 [32, 32, 3] the sum of their small
    versions. ``counts`` are int64 histograms, ``extremes`` the first images of each list as (value, record),
    ``damaged`` the first images, by number, that cannot be read or decoded with the reasons, and
    ``damaged_images`` how many there are. ``codes`` are arrays of CODES."""

    images: int = 0
    damaged_images: int = 0
    small_sum: npt.NDArray[np.uint64] = field(
        default_factory=lambda: np.zeros((MEAN_SIDE, MEAN_SIDE, 3), np.uint64)
    )
    counts: dict[str, npt.NDArray[np.int64]] = field(
        default_factory=lambda: {name: np.zeros(len(edges) - 1, np.int64) for name, edges in MEASURES.items()}
    )
    extremes: dict[str, list[Extreme]] = field(default_factory=lambda: {name: [] for name in EXTREMES})
    damaged: list[tuple[int, str]] = field(default_factory=list)
    codes: list[npt.NDArray[np.void]] = field(default_factory=list)

    def add(self, record: int, measures: Measures) -> None:
        """Add an image."""
        self.images += 1
        self.small_sum += measures.small
        for name, edges in MEASURES.items():
            at = np.searchsorted(edges, getattr(measures, name), side="right") - 1
            self.counts[name][min(at, len(edges) - 2)] += 1
        for name, (measure, _) in EXTREMES.items():
            if name != "blurriest" or not measures.is_flat:  # nothing there could be sharp
                self._keep(name, [(round(getattr(measures, measure), 3), record)])

    def add_damaged(self, record: int, reason: str) -> None:
        """Add an image that cannot be read or decoded."""
        self.damaged_images += 1
        self.damaged = heapq.nsmallest(MOST_DAMAGED, [*self.damaged, (record, reason)])

    def merge(self, other: PixelStatistics) -> None:
        """Add what another part of the dataset has."""
        self.images += other.images
        self.damaged_images += other.damaged_images
        self.small_sum += other.small_sum
        for name, counts in other.counts.items():
            self.counts[name] += counts
        for name, found in other.extremes.items():
            self._keep(name, found)
        self.damaged = heapq.nsmallest(MOST_DAMAGED, [*self.damaged, *other.damaged])
        self.codes += other.codes

    def _keep(self, name: str, found: Iterable[Extreme]) -> None:
        sign = EXTREMES[name][1]
        ordered: Callable[[Extreme], Any] = lambda one: (sign * one[0], one[1])  # noqa: E731
        self.extremes[name] = heapq.nsmallest(MOST_EXTREMES, [*self.extremes[name], *found], key=ordered)

    @property
    def all_codes(self) -> npt.NDArray[np.void]:
        """The rows of all images that were read, by record number."""
        joined = np.concatenate([np.empty(0, CODES), *self.codes])
        return joined[np.argsort(joined["record"], kind="stable")]

    @property
    def mean_image(self) -> npt.NDArray[np.uint8] | None:
        """The mean of the small versions, uint8 [32, 32, 3] in RGB; None without images."""
        return (self.small_sum / self.images).round().astype(np.uint8) if self.images else None

    def to_json(self) -> dict[str, Any]:
        """Return the histograms and the mean image as a JSON object."""
        mean = self.mean_image
        return {
            "histograms": {
                name: {"edges": [round(e, 3) for e in edges.tolist()], "counts": self.counts[name].tolist()}
                for name, edges in MEASURES.items()
            },
            "mean_image": None if mean is None else mean.tolist(),
        }
