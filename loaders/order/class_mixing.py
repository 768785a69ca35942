"""The classes in a batch where a dataset that is stored class after class is shuffled within a window."""

from __future__ import annotations

import math
import warnings
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

ENOUGH = 0.9  # of the classes that a batch has with a GlobalShuffle
EDGE_PLACES = (np.arange(32) + 0.5) / 32  # of an edge of the epoch, as parts of its length
MOST_PARTS = 200  # of a class: from there on, more make no difference

_warned: set[str] = set()


class SortedByClass(UserWarning):
    """Warning: records of a class are stored side by side, and the window mixes too few classes."""


@dataclass(frozen=True)
class ClassMixing:
    """How many classes a batch has on average, in an epoch over ``records`` stored class after class.

    ``classes`` is the number of classes, ``shard_records`` a shard's records, ``batch_size`` a batch's. All
    are taken for equally large. A batch is drawn from a window's and its own length of records, a share f of
    all. A class consists of c = records / classes / shard_records shards, or of a part of one (c = 1), and
    the shards are in random order. So k of a class's c parts are in the window with a binomial probability,
    and a batch of B has the class with the probability 1 - (1 - k / (f * classes * c))**B. At both ends of
    the epoch the window is not full: over half its length from the end, its share grows with the root of the
    place. Measured over orders of 2 to 1,000 classes, the average is right within 0.04 from 100 classes up,
    and too low for fewer.
    """

    records: int
    classes: int
    shard_records: float
    batch_size: int

    def per_batch(self, window: int) -> float:
        """The mean number of classes in a batch, over the epoch; with a window of all records, at most."""
        if window >= self.records:
            return float(self.classes * (1 - (1 - 1 / self.classes) ** self.batch_size))
        share = min(1.0, (window + self.batch_size) / self.records)
        edges = self._drawn(share * np.sqrt(EDGE_PLACES)).mean()
        return float((1 - share) * self._drawn(np.array([share])).mean() + share * edges)

    def suffices(self, window: int) -> bool:
        """Whether a batch has ENOUGH of the classes that it has with a GlobalShuffle."""
        return self.per_batch(window) >= ENOUGH * self.per_batch(self.records)

    def least_window(self) -> int | None:
        """The smallest window that suffices; None if it is over half the records, and spares few reads."""
        most = self.records // 2
        window = 1 + bisect_left(range(1, most + 1), True, key=self.suffices)
        return window if window <= most else None

    def _drawn(self, shares: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The mean number of classes in a batch that is drawn from each of these shares of the records."""
        parts = min(MOST_PARTS, max(1, round(self.records / self.classes / self.shard_records)))
        inside = np.arange(parts + 1)  # of a class's parts
        ways = np.array([math.comb(parts, number) for number in range(parts + 1)], float)
        share = shares[:, None]
        likely = ways * share**inside * (1 - share) ** (parts - inside)
        drawn = np.minimum(1.0, inside / np.maximum(1.0, share * self.classes * parts))
        classes = self.classes * (likely * (1 - (1 - drawn) ** self.batch_size)).sum(axis=1)
        return np.asarray(np.maximum(1.0, classes))


def warn_of_sorted_classes(
    mixing: ClassMixing, window: int, *, dataset: str, place: str, instead: str
) -> None:
    """Warn, once for each ``dataset`` (a root) at ``place``, where the window does not suffice.

    ``instead`` is what to do with the dataset.
    """
    if dataset in _warned or mixing.suffices(window):
        return
    _warned.add(dataset)
    least = mixing.least_window()
    local = f", or a LocalShuffle of at least {least} records" if least else ""
    warnings.warn(
        f"{place} is stored class after class: through a window of {window} records a batch of "
        f"{mixing.batch_size} has about {mixing.per_batch(window):.0f} of {mixing.classes} classes, and "
        f"{mixing.per_batch(mixing.records):.0f} with a GlobalShuffle(). Use that{local}, or {instead}",
        SortedByClass,
        stacklevel=5,  # the line that makes the Loader
    )


def warn_of_few_classes(
    found: float, expected: float, window: int, *, dataset: str, place: str, batch_size: int, instead: str
) -> None:
    """Warn, once for each ``dataset`` (a root) at ``place``, that batches have few of the classes."""
    if dataset in _warned:
        return
    _warned.add(dataset)
    warnings.warn(
        f"{place} is stored with records of a class side by side: through a window of {window} records a batch "
        f"of {batch_size} has about {found:.0f} classes, and {expected:.0f} with a GlobalShuffle(). Use that, a "
        f"larger window, or {instead}; print(loader.shuffle_quality()) says more",
        SortedByClass,
        stacklevel=5,  # the line that makes the Loader
    )
