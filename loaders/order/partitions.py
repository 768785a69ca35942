"""The partitions of a dataset: records that are read, and shuffled, apart from all others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from .displaced_order import BLOCK, DisplacedOrder, Records, permutation
from .rng import Purpose, keyed_bits

Shards = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Partition:
    """Partition ``number`` of ``of``: runs of adjacent records, one of each of ``shards``, in stored order.

    A run has a record number of ``firsts``, and as many records as ``counts`` says.
    """

    number: int
    of: int
    shards: Shards
    firsts: Records
    counts: Records

    @property
    def records(self) -> int:
        """The number of records."""
        return int(self.counts.sum())

    def order(self, window: int, *, seed: int, epoch: int) -> DisplacedOrder:
        """Return its record numbers in the order of the epoch, displaced by less than ``window`` places."""
        runs, is_all = self.runs(window, seed=seed, epoch=epoch), self.of == 1 and window >= self.records
        return DisplacedOrder(
            self.records,
            window=min(window, self.records),
            bits=keyed_bits(Purpose.RECORD_ORDER, seed=seed, epoch=epoch, item=self.number),
            stream=None if is_all else RecordRuns(self.firsts[runs], self.counts[runs]).part,
            block=math.ceil(BLOCK / self.of),  # a rank may have a block of each
        )

    def runs(self, window: int, *, seed: int, epoch: int) -> npt.NDArray[np.int64]:
        """Return the order of the runs before records are displaced: random, unless the window has all."""
        if window >= self.records:
            return np.arange(len(self.shards))
        bits = keyed_bits(Purpose.SHARD_ORDER, seed=seed, epoch=epoch, item=self.number)
        return permutation(len(self.shards), bits)


def dealt(shard_counts: Sequence[int], partitions: int) -> list[Partition]:
    """Return the partitions of shards that have these record counts, in stored order.

    The shards are laid side by side in an order that depends on nothing but their number, and this row is
    cut: the records of partition p are as many as the places p, p + partitions, ... of an epoch, so that
    partitions differ by one record at most. A shard at a cut has records of both sides.
    """
    counts = np.asarray(shard_counts, np.int64)
    firsts = np.cumsum(counts) - counts
    if partitions == 1:
        return [Partition(0, 1, np.arange(len(counts)), firsts, counts)]
    row = permutation(len(counts), keyed_bits(Purpose.PARTITION, seed=0, epoch=0))
    row = row[counts[row] > 0]
    ends = np.cumsum(counts[row])
    cuts = np.cumsum([0, *(places_in(int(counts.sum()), number, partitions) for number in range(partitions))])
    found = []
    for number, (start, stop) in enumerate(pairwise(cuts)):
        inside = slice(np.searchsorted(ends, start, side="right"), np.searchsorted(ends, stop) + 1)
        shards, begins = row[inside], ends[inside] - counts[row[inside]]
        starts, stops = np.maximum(begins, start), np.minimum(ends[inside], stop)
        stored = np.argsort(shards)
        runs = shards, firsts[shards] + starts - begins, stops - starts
        found.append(Partition(number, partitions, *(values[stored] for values in runs)))
    return found


def places_in(places: int, partition: int, partitions: int) -> int:
    """Return how many of the first ``places`` of an epoch's order are of this partition: each in turn."""
    return len(range(partition, places, partitions))


class RecordRuns:
    """Runs of adjacent record numbers, one after the other: each begins at one of ``firsts``."""

    def __init__(self, firsts: Records, counts: Records) -> None:
        self._ends = np.cumsum(counts)
        self._offsets = firsts - (self._ends - counts)

    def part(self, start: int, stop: int) -> Records:
        """Return the record numbers from place ``start`` to ``stop``."""
        runs = slice(
            int(np.searchsorted(self._ends, start, side="right")),
            int(np.searchsorted(self._ends, stop, side="left")) + 1,
        )
        numbers = np.repeat(self._offsets[runs], np.diff(np.minimum(self._ends[runs], stop), prepend=start))
        numbers += np.arange(start, stop, dtype=np.int64)
        return numbers
