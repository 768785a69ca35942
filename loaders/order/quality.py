"""Measures of how well an epoch's batches mix the records and classes, and warnings if they do not."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import UsageError
from shardprep.loaders.order.epoch import Epoch, EpochPlan
from shardprep.loaders.order.parts import Records

ENOUGH_CLASSES = 0.9  # of the classes that a batch has with a GlobalShuffle
EDGE_PLACES = (np.arange(32) + 0.5) / 32  # places sampled in an edge of the epoch, as fractions of the edge
MAX_PARTS = 200  # of a class; more make no difference

Labels = npt.NDArray[np.integer[Any]]


class SortedByClass(UserWarning):
    """Warning: records of a class are stored side by side, and the window mixes too few classes."""


@dataclass(frozen=True)
class Means:
    """A measured mean, and the one ``expected`` of a full shuffle."""

    found: float
    expected: float

    @property
    def is_enough(self) -> bool:
        """Whether this number of classes is nearly that of a full shuffle."""
        return self.found >= ENOUGH_CLASSES * self.expected


@dataclass(frozen=True)
class ClassMixing:
    """A model of the mean number of classes per batch, for ``records`` stored class by class.

    ``classes`` is the number of classes, ``shard_records`` the records of a shard, ``batch_size`` those of a
    batch; classes, and shards, are taken as equally large. A batch is drawn from a window plus a batch of
    records, a fraction f of all. A class consists of c = records / classes / shard_records shards, or of part
    of one (c = 1), and the shards are in random order. So k of a class's c parts are in the window with a
    binomial probability, and a batch of B has the class with probability 1 - (1 - k / (f * classes * c))**B.
    At both ends of the epoch the window is not full: within half a window of the end, its fraction grows with
    the square root of the place. In orders of 2 to 1,000 classes, the mean was right within 0.04 from 100
    classes up, and too low for fewer.
    """

    records: int
    classes: int
    shard_records: float
    batch_size: int

    def per_batch(self, window: int) -> float:
        """Return the mean number of classes in a batch of the epoch; highest for a window of all records."""
        if window >= self.records:
            return float(self.classes * (1 - (1 - 1 / self.classes) ** self.batch_size))
        share = min(1.0, (window + self.batch_size) / self.records)
        edges = self._mean_classes(share * np.sqrt(EDGE_PLACES)).mean()
        return float((1 - share) * self._mean_classes(np.array([share])).mean() + share * edges)

    def least_window(self) -> int | None:
        """Return the smallest window whose batches have ENOUGH_CLASSES of the classes of a GlobalShuffle.

        None if it exceeds half the records, and so saves little.
        """
        enough, most = ENOUGH_CLASSES * self.per_batch(self.records), self.records // 2
        window = 1 + bisect_left(range(1, most + 1), enough, key=self.per_batch)
        return window if window <= most else None

    def _mean_classes(self, shares: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the mean number of classes in a batch drawn from each of these fractions of the records."""
        parts = min(MAX_PARTS, max(1, round(self.records / self.classes / self.shard_records)))
        inside = np.arange(parts + 1)  # parts of a class in the window
        ways = np.array([math.comb(parts, number) for number in range(parts + 1)], float)
        share = shares[:, None]
        likely = ways * share**inside * (1 - share) ** (parts - inside)
        drawn = np.minimum(1.0, inside / np.maximum(1.0, share * self.classes * parts))
        classes = self.classes * (likely * (1 - (1 - drawn) ** self.batch_size)).sum(axis=1)
        return np.asarray(np.maximum(1.0, classes))


OFTEN_FACTOR = 3.0  # times as often as by chance; below it, meeting again is taken as chance
CHANCE_DEVIATIONS = 5.0  # standard deviations that a count may differ by chance
FEWER_DEVIATIONS = 4.0  # by which the mean number of classes of a few batches may be lower by chance
SAMPLED_BATCHES = 1000  # batches of full shuffles, whose standard deviation is measured


@dataclass(frozen=True)
class Displacement:
    """How far records are from their stored places, in places of the epoch: mean, and two percentiles."""

    mean: float
    p5: float
    p95: float


@dataclass(frozen=True)
class ShuffleQuality:
    """How well a rank's full batches in one epoch are mixed, compared with a full shuffle.

    Attributes:
        records: Number of all records.
        batch_size: Records per batch.
        batches: Number of batches measured.
        classes: Mean number of classes in a batch.
        fewest: Number of classes in the worst batch.
        distance: Distance of the mean from the expected one, in standard deviations of one batch (0 if these
            do not vary).
        displacement: How far records move, in places.
        stored_neighbours: Mean distance in the epoch, in places, of records stored side by side; None for
            several ranks.
        meet_again: Fraction of neighbours in a batch that share a batch again in the next epoch.
        kept: Fraction of the rank's records that it has again in the next epoch.
        least_window: Number of records of a :class:`LocalShuffle` that would do; None if none is needed or
            only a :class:`GlobalShuffle` does.
        partitions: Number of the shuffle's partitions, whose records stay with the same ranks in every epoch.
    """

    records: int
    batch_size: int
    batches: int
    classes: Means
    fewest: int
    distance: float
    displacement: Displacement
    stored_neighbours: Means | None
    meet_again: Means
    kept: Means
    least_window: int | None
    partitions: int = 1

    @property
    def has_enough_classes(self) -> bool:
        """Whether batches hold nearly the classes of a full shuffle, or a few batches fewer by chance."""
        return self.classes.is_enough or -FEWER_DEVIATIONS < self.distance * math.sqrt(self.batches) < 0

    @property
    def is_full(self) -> bool:
        """Whether classes and neighbours are mixed as well as in a full shuffle."""
        pairs = self.batches * (self.batch_size - 1)
        chance = self.meet_again.expected * pairs
        most = OFTEN_FACTOR * chance + CHANCE_DEVIATIONS * math.sqrt(chance) + 1
        return self.has_enough_classes and self.meet_again.found * pairs <= most

    @property
    def sentence(self) -> str:
        """The verdict: the finding, and advice."""
        classes = (
            f"batches hold {self.classes.found:,.1f} classes where {self.classes.expected:,.1f} are expected"
        )
        if self.is_full:
            return f"As good as a full shuffle: {classes}."
        if self.has_enough_classes and self.meet_again.found == 1:
            return f"Every epoch has the same batches: {classes}; give a shuffle."
        if self.has_enough_classes:
            times = self.meet_again.found / self.meet_again.expected
            return (
                f"Partly mixed: {classes}, but neighbours in a batch meet again in the next epoch {times:,.0f} times "
                f"as often as by chance; use a larger window{' or fewer partitions' if self.partitions > 1 else ''}."
            )
        local = f"a LocalShuffle of at least {self.least_window:,} records, " if self.least_window else ""
        return f"Not well mixed: {classes}; use {local}GlobalShuffle(), or convert with --order shuffled."

    def to_json(self) -> dict[str, Any]:
        """Return a value of JSON types."""
        return asdict(self) | {"is_full": self.is_full, "sentence": self.sentence}

    def __str__(self) -> str:
        return self.sentence


def shuffle_quality(plan: EpochPlan, labels: Labels, epoch: int) -> ShuffleQuality:
    """Measure the batches of the plan's rank in ``epoch`` and the next one. Reads no record.

    ``labels`` has the class of each record of the plan, in stored order. Uses about 60 bytes per record. If
    gaps are kept, the omitted records count as delivered. Raises UsageError for an epoch without a full
    batch.
    """
    epochs, plan = [], plan.with_full_batches
    for number in (epoch, epoch + 1):
        full = [batch for batch in Epoch(plan, number).batches() if len(batch) == plan.batch_size]
        if not full:
            raise UsageError(
                f"an epoch has no full batch of {plan.batch_size} records; use a smaller batch_size"
            )
        epochs.append(np.stack(full))
    if plan.omission:  # renumber the remaining records, as a dataset of their own
        is_left = ~plan.omission.mask_at(np.arange(len(labels)), epoch)
        places = np.cumsum(is_left) - 1
        labels, epochs = labels[is_left], [places[numbers] for numbers in epochs]
    first, second = epochs
    shard_records = len(labels) / len(plan.shard_counts)
    quality = quality_of_batches(
        first, second, labels, rank=plan.rank, world_size=plan.world_size, shard_records=shard_records
    )
    return replace(quality, partitions=plan.partitions)


def quality_of_batches(
    first: Records,
    second: Records,
    labels: Labels,
    *,
    rank: int = 0,
    world_size: int = 1,
    shard_records: float = 1,
) -> ShuffleQuality:
    """Measure any loader's batches in an epoch (``first``) and the next one (``second``).

    Both are record numbers of shape (batches, batch_size), as delivered to ``rank`` of ``world_size``.
    ``labels`` has the class of each record in stored order. A shard holds ``shard_records`` on average.
    """
    records, (batches, batch_size) = len(labels), first.shape
    counts = _class_counts(labels[first])
    classes = Means(float(counts.mean()), expected_classes(labels, batch_size))
    mixing = ClassMixing(records, len(np.unique(labels)), shard_records, batch_size)
    steps = np.arange(batches)[:, None] * world_size + rank
    displacements = np.abs(steps * batch_size + np.arange(batch_size) - first)
    low, high = np.percentile(displacements, (5, 95)).tolist()
    batch_of = np.full(records, -1)  # -1 for records in none
    batch_of[second] = np.arange(len(second))[:, None]
    in_both = batch_of[first]
    again = (in_both[:, 1:] == in_both[:, :-1]) & (in_both[:, 1:] >= 0)
    kept = second.size / records
    neighbours = None
    if world_size == 1:  # a mean distance, for random places a third of the epoch
        places = np.full(records, -1)
        places[first.reshape(-1)] = np.arange(first.size)
        distances = np.abs(np.diff(places))[(places[1:] >= 0) & (places[:-1] >= 0)]
        neighbours = Means(float(distances.mean()), (first.size + 1) / 3) if len(distances) else None
    # the deviation of the classes in batches of random permutations
    copies = np.tile(labels, (max(1, SAMPLED_BATCHES * batch_size // records), 1))
    shuffled = np.random.default_rng(0).permuted(copies, axis=1)[:, : records // batch_size * batch_size]
    deviation = float(_class_counts(shuffled.reshape(-1, batch_size)[:SAMPLED_BATCHES]).std())
    quality = ShuffleQuality(
        records=records,
        batch_size=batch_size,
        batches=batches,
        classes=classes,
        fewest=int(counts.min()),
        distance=(classes.found - classes.expected) / deviation if deviation else 0.0,
        displacement=Displacement(float(displacements.mean()), low, high),
        stored_neighbours=neighbours,
        meet_again=Means(
            float(again.mean()) if again.size else 0.0, kept * (batch_size - 1) / max(1, records - 1)
        ),
        kept=Means(float((in_both >= 0).mean()), kept),
        least_window=None,
    )
    return quality if quality.has_enough_classes else replace(quality, least_window=mixing.least_window())


def expected_classes(labels: Labels, batch_size: int) -> float:
    """Return the mean number of classes in a batch drawn from all records without replacement.

    A class of n of N records is absent with probability (1 - n / N) (1 - n / (N - 1)) ..., one factor per
    record of the batch.
    """
    _, counts = np.unique(labels, return_counts=True)
    sizes, classes = np.unique(counts, return_counts=True)
    present = len(labels) - np.arange(batch_size)
    with np.errstate(divide="ignore"):
        absent = [np.log1p(np.maximum(-1.0, -size / present)).sum() for size in sizes]
    return float((classes * -np.expm1(absent)).sum())


def _class_counts(labels: Labels) -> npt.NDArray[np.int64]:
    ordered = np.sort(labels, axis=1)
    return np.asarray(1 + np.count_nonzero(np.diff(ordered, axis=1), axis=1))


SAMPLED_PAIRS = 4096  # of records stored side by side whose labels are compared
SAMPLED_LABELS = 1 << 16  # used to compute the number of classes in a fully shuffled batch
SAMPLED_PLACES = 3  # of the epoch; each costs the order of a window
STEPS_PER_PLACE = 8
MAX_WINDOW = 1 << 17  # records; computing the order of a larger window takes a tenth of a second
ADJACENT_FACTOR = 2.0  # times as often as by chance; more equal neighbours are due to the stored order


def sample_mixing(plan: EpochPlan, labels: Labels, window: int) -> Means | None:
    """Return the mean number of classes in a batch if it is too small, else None. Reads no record.

    ``labels`` has the class of each record of the plan, in stored order. Takes under a millisecond unless
    records of a class lie side by side. Then some batches are computed, unless the window is too large.
    """
    if not 1 < plan.batch_size < len(labels) or window > MAX_WINDOW or not _has_class_runs(labels):
        return None
    full = plan.with_full_batches
    steps = len(full.split(0)) - (0 if plan.drop_last else 1)
    chosen = list(range(steps))
    if steps >= SAMPLED_PLACES * STEPS_PER_PLACE:
        begins = [steps * (2 * place + 1) // (2 * SAMPLED_PLACES) for place in range(SAMPLED_PLACES)]
        chosen = [min(begin + at, steps - 1) for begin in begins for at in range(STEPS_PER_PLACE)]
    counts = [len(np.unique(labels[batch])) for batch in map(Epoch(full, 0).batch, chosen)]
    mean = float(np.mean(counts)) if counts else 0.0
    if plan.omission.closes_gaps:
        labels = np.delete(labels, plan.omission.positions)
    means = Means(mean, expected_classes(labels[:: 1 + len(labels) // SAMPLED_LABELS], plan.batch_size))
    return means if mean and not means.is_enough else None


def _has_class_runs(labels: Labels) -> bool:
    """Whether neighbours share a class much more often than two random records."""
    count = min(SAMPLED_PAIRS, len(labels) - 1)
    places = np.arange(count) * (len(labels) - 1) // count
    beside, apart = labels[places], labels[(places + len(labels) // 2) % len(labels)]
    equal = np.count_nonzero(beside == labels[places + 1])
    _, sizes = np.unique(np.concatenate([beside, apart]), return_counts=True)
    chance = float((sizes / sizes.sum()) @ (sizes / sizes.sum())) * count
    return bool(equal > ADJACENT_FACTOR * chance + 5 * np.sqrt(chance) + 1)
