"""The steps at which one rank uses each shard in an epoch, computed from the order alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardprep.loaders.order.epoch import EpochPlan, RankSplit, partition_window
from shardprep.loaders.order.parts import Partition, Records, dealt

Shards = npt.NDArray[np.int64]
Steps = npt.NDArray[np.int64]

EXACT_RECORDS = 1 << 22  # for more, computing the order takes seconds, and the bounds are close
DEVIATIONS = 7  # a sum of random numbers exceeds this distance from its mean once in 10^11 cases
PLACES = 1 << 18  # computed at a time


@dataclass(frozen=True, eq=False)
class ShardUses:
    """The ``shards`` of an epoch in order of first use, and the steps of their first and last use."""

    shards: Shards
    firsts: Steps
    lasts: Steps

    def at(self, step: int) -> Shards:
        """Return the shards in use at a step."""
        begun = int(np.searchsorted(self.firsts, step, side="right"))
        found: Shards = self.shards[:begun][self.lasts[:begun] >= step]
        return found

    def turns(self) -> tuple[Steps, Shards]:
        """Return the steps, ascending, of every shard's first and last use, and the shards."""
        steps = np.concatenate([self.firsts, self.lasts])
        order = np.argsort(steps, kind="stable")
        return steps[order], np.concatenate([self.shards, self.shards])[order]

    def peak(self, sizes: npt.NDArray[np.int64]) -> int:
        """Return the largest total size of the shards in use at one step."""
        if not len(self.shards):
            return 0
        changes = np.zeros(int(self.lasts.max()) + 2, np.int64)
        np.add.at(changes, self.firsts, sizes[self.shards])
        np.subtract.at(changes, self.lasts + 1, sizes[self.shards])
        return int(np.cumsum(changes).max())


def shard_uses(plan: EpochPlan, epoch: int, *, start: int = 0) -> ShardUses:
    """Return the shard uses of an epoch that continues at the place ``start``.

    The steps are bounds above EXACT_RECORDS records, and if the window covers a whole partition.
    """
    shards = len(plan.shard_counts)
    firsts, lasts = np.full(shards, np.iinfo(np.int64).max), np.full(shards, -1)
    steps = len(plan.split(start))
    for touched, begins, ends in _uses(plan, epoch, start) if steps else ():
        np.minimum.at(firsts, touched, begins)
        np.maximum.at(lasts, touched, np.minimum(ends, steps - 1))
    lasts[firsts >= steps] = -1  # a partition may have one step more than the epoch
    used = np.flatnonzero(lasts >= 0)
    used = used[np.argsort(firsts[used], kind="stable")]
    return ShardUses(used, firsts[used], lasts[used])


def _uses(plan: EpochPlan, epoch: int, start: int) -> Iterator[tuple[Shards, Steps, Steps]]:
    """Yield shards with their first and last steps, for parts of each partition of this rank."""
    split, records = plan.split(start), sum(plan.shard_counts)
    window = partition_window(plan.shuffle, records) if plan.shuffle else 1
    partitions = dealt(plan.shard_counts, plan.partitions)
    for number, part in split.parts.items():
        partition = partitions[number]
        if window >= partition.records:
            used = partition.shards[partition.counts > 0] if len(part) else partition.shards[:0]
            yield used, np.zeros_like(used), np.full_like(used, len(part) - 1)
        elif records > EXACT_RECORDS and plan.places == records:
            yield _bounds(plan, epoch, partition, window, part)
        else:
            yield from _exact(plan, epoch, number, part, len(split))


def _exact(
    plan: EpochPlan, epoch: int, number: int, part: RankSplit, epoch_steps: int
) -> Iterator[tuple[Shards, Steps, Steps]]:
    order, ends = plan.order(epoch), np.cumsum(plan.shard_counts)
    for begin in range(part.start, part.stop, PLACES):
        places = np.arange(begin, min(begin + PLACES, part.stop))
        steps = part.steps_of(places)
        used = (steps >= 0) & (steps < epoch_steps)
        records = order.batch({number: range(begin, begin + len(places))})[used]
        touched, steps = np.searchsorted(ends, records, side="right"), steps[used]
        firsts, lasts = np.full(len(ends), -1), np.full(len(ends), -1)
        lasts[touched] = steps  # of repeated indices, numpy keeps the last value
        firsts[touched[::-1]] = steps[::-1]
        found = np.flatnonzero(lasts >= 0)
        yield found, firsts[found], lasts[found]


def _bounds(
    plan: EpochPlan, epoch: int, partition: Partition, window: int, part: RankSplit
) -> tuple[Shards, Steps, Steps]:
    """Bound the first and last steps: the record at place i of the stream has a key in i .. i + window.

    A key's rank is a sum of random numbers with a known mean and a deviation below sqrt(window / 6).
    """
    runs = partition.runs(window, seed=plan.seed, epoch=epoch) if plan.shuffle else slice(None)
    counts = partition.counts[runs]
    stops = np.cumsum(counts)
    margin = DEVIATIONS * (window / 6) ** 0.5 + 1 if window > 1 else 0
    firsts = _mean_rank(stops - counts, window, partition.records) - margin
    lasts = _mean_rank(stops - 1 + window, window, partition.records) + margin
    used = (counts > 0) & (lasts >= part.start) & (firsts < part.stop)
    begins, ends = (np.floor(each[used]).astype(np.int64) for each in (firsts, lasts))
    return partition.shards[runs][used], part.steps_reached(begins), part.steps_reached(ends)


def _mean_rank(keys: Records, window: int, count: int) -> npt.NDArray[np.float64]:
    """The mean number of keys below each of ``keys``, where key i is uniform in i .. i + ``window``."""
    return _area(keys, window) - _area(keys - count, window)


def _area(lengths: Records, window: int) -> npt.NDArray[np.float64]:
    """The area under a ramp from 0 to 1 over ``window``, then constant."""
    rising = np.clip(lengths, 0, window)
    return rising**2 / (2 * window) + np.maximum(lengths - window, 0)
