"""How well the batches of an epoch are mixed, beside a full shuffle: from record numbers and labels alone."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import UsageError

from .class_mixing import ENOUGH, ClassMixing
from .displaced_order import Records
from .epoch import Epoch, EpochPlan

OFTEN = 3.0  # times as often as by chance; below it, records are taken to meet again by chance
CHANCE = 5.0  # standard deviations of a count that is due to chance
SAMPLED = 1000  # batches of a full shuffle of which the standard deviation is measured


@dataclass(frozen=True)
class Beside:
    """A mean that was ``found``, and the one ``expected`` of a full shuffle."""

    found: float
    expected: float


@dataclass(frozen=True)
class Displacement:
    """How far records are from their stored places, in places of the epoch: mean, and two percentiles."""

    mean: float
    p5: float
    p95: float


@dataclass(frozen=True)
class ShuffleQuality:
    """The mixing of a rank's full batches in one epoch, beside batches of a full shuffle.

    ``records`` is the number of all records, ``batches`` that of the measured batches of ``batch_size``.
    ``classes`` is the mean number of classes in a batch, ``fewest`` that of the worst batch, and ``distance``
    how far the mean is from the expected one, in standard deviations of one batch (0 where these have none).
    ``displacement`` is that of the records, ``stored_neighbours`` the mean distance in the epoch of records
    that are stored side by side, in places; None for several ranks. ``meet_again`` is the share of
    neighbours in a batch that are in one batch in the next epoch, too. ``kept`` is the share of the rank's
    records that it has in the next epoch, too. ``least_window`` is the number of records of a
    :class:`LocalShuffle` that would do, None where it is not needed or only a :class:`GlobalShuffle` does.
    ``partitions`` are those of the shuffle: their records are in the same rank's batches in every epoch.
    """

    records: int
    batch_size: int
    batches: int
    classes: Beside
    fewest: int
    distance: float
    displacement: Displacement
    stored_neighbours: Beside | None
    meet_again: Beside
    kept: Beside
    least_window: int | None
    partitions: int = 1

    @property
    def is_full(self) -> bool:
        """Whether the batches are as good as those of a full shuffle, by classes and neighbours."""
        return self._has_classes and not self._meet_often

    @property
    def sentence(self) -> str:
        """What was found, and what to do, as a sentence."""
        classes = (
            f"batches hold {self.classes.found:,.1f} classes where {self.classes.expected:,.1f} are expected"
        )
        if self.is_full:
            return f"As good as a full shuffle: {classes}."
        if self._has_classes and self.meet_again.found == 1:
            return f"Every epoch has the same batches: {classes}; give a shuffle."
        if self._has_classes:
            times = self.meet_again.found / self.meet_again.expected
            return (
                f"Mixed in part: {classes}, but neighbours in a batch meet again in the next epoch {times:,.0f} times "
                f"as often as by chance; use a larger window{' or fewer partitions' if self.partitions > 1 else ''}."
            )
        local = f"a LocalShuffle of at least {self.least_window:,} records, " if self.least_window else ""
        return f"Not well mixed: {classes}; use {local}GlobalShuffle(), or convert with --order shuffled."

    def to_json(self) -> dict[str, Any]:
        """Return a value of JSON types."""
        return asdict(self) | {"is_full": self.is_full, "sentence": self.sentence}

    def __str__(self) -> str:
        return self.sentence

    @property
    def _has_classes(self) -> bool:
        return self.classes.found >= ENOUGH * self.classes.expected

    @property
    def _meet_often(self) -> bool:
        pairs = self.batches * (self.batch_size - 1)
        chance = self.meet_again.expected * pairs
        return self.meet_again.found * pairs > OFTEN * chance + CHANCE * math.sqrt(chance) + 1


def shuffle_quality(plan: EpochPlan, labels: npt.NDArray[np.integer[Any]], epoch: int) -> ShuffleQuality:
    """Measure the batches of ``epoch``, and of the next one, of the plan's rank. Pure.

    ``labels`` has the class of each record of the plan, in stored order. Takes about 60 bytes per record.
    Raises UsageError for an epoch without a full batch.
    """
    first, second = (_full_batches(plan, number) for number in (epoch, epoch + 1))
    shard_records = len(labels) / len(plan.shard_counts)
    found = quality_of_batches(
        first, second, labels, rank=plan.rank, world_size=plan.world_size, shard_records=shard_records
    )
    return replace(found, partitions=plan.shuffle.partitions if plan.shuffle else 1)


def quality_of_batches(
    first: Records,
    second: Records,
    labels: npt.NDArray[np.integer[Any]],
    *,
    rank: int = 0,
    world_size: int = 1,
    shard_records: float = 1,
) -> ShuffleQuality:
    """Measure the batches ``first`` of an epoch and ``second`` of the next one, of any loader.

    Both are record numbers of shape (batches, batch_size), in the order of delivery to ``rank`` of
    ``world_size``. ``labels`` has the class of each record in stored order, and a shard holds
    ``shard_records`` of them on average.
    """
    records, (batches, batch_size) = len(labels), first.shape
    counts = _class_counts(labels[first])
    classes = Beside(float(counts.mean()), expected_classes(labels, batch_size))
    mixing = ClassMixing(records, len(np.unique(labels)), shard_records, batch_size)
    steps = np.arange(batches)[:, None] * world_size + rank
    places = steps * batch_size + np.arange(batch_size)
    batch_of = _batch_of(second, records)
    in_both = batch_of[first]
    again = (in_both[:, 1:] == in_both[:, :-1]) & (in_both[:, 1:] >= 0)
    kept = second.size / records
    return ShuffleQuality(
        records=records,
        batch_size=batch_size,
        batches=batches,
        classes=classes,
        fewest=int(counts.min()),
        distance=_distance(classes, labels, batch_size),
        displacement=_displacement(np.abs(places - first)),
        stored_neighbours=_neighbours(first, records) if world_size == 1 else None,
        meet_again=Beside(_mean(again), kept * (batch_size - 1) / max(1, records - 1)),
        kept=Beside(_mean(in_both >= 0), kept),
        least_window=None if classes.found >= ENOUGH * classes.expected else mixing.least_window(),
    )


def expected_classes(labels: npt.NDArray[np.integer[Any]], batch_size: int) -> float:
    """Return the mean number of classes in a batch that is drawn from all records without replacement.

    A class of n of N records is absent with the probability (1 - n / N) (1 - n / (N - 1)) ..., a factor for
    each record of the batch.
    """
    _, counts = np.unique(labels, return_counts=True)
    sizes, classes = np.unique(counts, return_counts=True)
    present = len(labels) - np.arange(batch_size)
    with np.errstate(divide="ignore"):
        absent = [np.log1p(np.maximum(-1.0, -size / present)).sum() for size in sizes]
    return float((classes * -np.expm1(absent)).sum())


def _full_batches(plan: EpochPlan, epoch: int) -> Records:
    batches = [batch for batch in Epoch(plan, epoch).batches() if len(batch) == plan.batch_size]
    if not batches:
        raise UsageError(f"an epoch has no full batch of {plan.batch_size} records; use a smaller batch_size")
    return np.stack(batches)


def _class_counts(labels: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int64]:
    """The number of classes in each row."""
    ordered = np.sort(labels, axis=1)
    return np.asarray(1 + np.count_nonzero(np.diff(ordered, axis=1), axis=1))


def _distance(classes: Beside, labels: npt.NDArray[np.integer[Any]], batch_size: int) -> float:
    """The distance in standard deviations, which come from batches of one random permutation."""
    shuffled = np.random.default_rng(0).permutation(labels)[: SAMPLED * batch_size]
    whole = len(shuffled) // batch_size * batch_size
    deviation = float(_class_counts(shuffled[:whole].reshape(-1, batch_size)).std())
    return (classes.found - classes.expected) / deviation if deviation else 0.0


def _displacement(moved: npt.NDArray[np.int64]) -> Displacement:
    low, high = np.percentile(moved, (5, 95))
    return Displacement(float(moved.mean()), float(low), float(high))


def _batch_of(batches: Records, records: int) -> npt.NDArray[np.int64]:
    """The batch of each record; -1 for records in none."""
    found = np.full(records, -1)
    found[batches] = np.arange(len(batches))[:, None]
    return found


def _neighbours(first: Records, records: int) -> Beside | None:
    """The mean distance of records stored side by side, beside that of two random places, a third."""
    places = np.full(records, -1)
    places[first.reshape(-1)] = np.arange(first.size)
    both = (places[1:] >= 0) & (places[:-1] >= 0)
    apart = np.abs(np.diff(places))[both]
    return Beside(float(apart.mean()), (first.size + 1) / 3) if len(apart) else None


def _mean(flags: npt.NDArray[np.bool_]) -> float:
    return float(flags.mean()) if flags.size else 0.0
