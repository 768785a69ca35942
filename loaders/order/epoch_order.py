"""The order of an epoch and each rank's share of it: a pure function of the shard sizes and the seed.

A record number is a position in the dataset's index. Only a window of the order is computed at a time.
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import UsageError
from shardprep.formats.runtime.sizes import byte_count, checked_int
from shardprep.loaders.order.omission import ClosedOrder, Omission, OrderedPart, Ranges
from shardprep.loaders.order.parts import MAX_RECORDS, DisplacedOrder, Records, dealt, places_in
from shardprep.loaders.order.rng import Purpose, keyed_bits


class Shuffle(ABC):
    """How far a record may move from its stored place. Frozen, picklable, compared by value.

    Each of the ``partitions`` is shuffled separately.
    """

    partitions: int = 1

    @abstractmethod
    def in_records(self, mean_record_bytes: float) -> Shuffle:
        """Return the same shuffle with its window counted in records of this mean size."""

    @abstractmethod
    def window_of(self, records: int) -> int:
        """Return the window over a dataset of ``records``; all of them for a full permutation."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Return the shuffle as JSON values, for a loader's state; :meth:`from_json` reads it."""

    @staticmethod
    def from_json(value: object) -> Shuffle:
        """Return the shuffle that ``to_json`` described. Raises ValueError or UsageError."""
        match value:
            case {"kind": "global", **rest} if not rest:
                return GlobalShuffle()
            case {"kind": "local", "window": int() as window, **rest} if rest.keys() <= {"partitions"}:
                shuffle = LocalShuffle(window, **cast("dict[str, int]", rest))
                if shuffle.to_json() == value:
                    return shuffle
        raise ValueError(f"{value!r} is not a shuffle")


@dataclass(frozen=True)
class GlobalShuffle(Shuffle):
    """A permutation of the whole dataset: the best shuffle, with random reads."""

    def in_records(self, mean_record_bytes: float) -> GlobalShuffle:
        return self

    def window_of(self, records: int) -> int:
        return records

    def to_json(self) -> dict[str, Any]:
        return {"kind": "global"}


@dataclass(frozen=True)
class LocalShuffle(Shuffle):
    """Shards in random order, their records displaced by less than ``window`` places.

    ``window`` is a number of records, or a size in bytes as text (``"2GiB"``, ``"512MB"``). At any moment the
    reads are at most ``window`` places apart. Away from both ends a record moves by up to half the window in
    either direction, a quarter on average, with a standard deviation of 0.29 windows: a window of 3 n mixes
    as widely as tensorpack's buffer of n. There is no delay to fill the window. A window of at least the
    dataset's size equals a :class:`GlobalShuffle`, within each partition if there are several.

    With ``partitions``, each rank reads only its own shards, the same in every epoch and for every seed. The
    shards are divided into this many partitions with equal numbers of records (a shard at a boundary belongs
    to both). Each is shuffled separately, in its share of the window, and supplies an equal share of every
    global step. So the global steps are the same for any number of ranks that divides the number of
    partitions or is a multiple of it; the Loader rejects other numbers of ranks, and batch sizes that would
    give partitions unequal shares. By default every rank reads every shard.

    Raises UsageError for a window or partitions below 1.
    """

    window: int | str
    partitions: int = 1

    def __post_init__(self) -> None:
        if hasattr(self.window, "__index__") and not isinstance(self.window, bool):  # also numpy's integers
            object.__setattr__(self, "window", operator.index(self.window))
        if self._amount() < 1:
            raise UsageError(f"a shuffle window must be at least 1, not {self.window!r}")
        object.__setattr__(self, "partitions", checked_int(self.partitions, "partitions", least=1))

    def __repr__(self) -> str:  # stored in the states of flows
        partitions = f", partitions={self.partitions}" if self.partitions > 1 else ""
        return f"LocalShuffle(window={self.window!r}{partitions})"

    def in_records(self, mean_record_bytes: float) -> LocalShuffle:
        if isinstance(self.window, int):
            return self
        return replace(self, window=max(1, int(self._amount() / max(1.0, mean_record_bytes))))

    def window_of(self, records: int) -> int:
        if not isinstance(self.window, int):
            raise UsageError(f"a window of {self.window!r} has no number of records before in_records()")
        return min(self.window, records)

    def to_json(self) -> dict[str, Any]:
        values = {"kind": "local", "window": self.window}
        return values if self.partitions == 1 else values | {"partitions": self.partitions}

    def _amount(self) -> float:
        """The window's number of records or bytes. Raises UsageError."""
        return self.window if type(self.window) is int else byte_count(self.window, of="a shuffle window")


class EpochOrder:
    """All record numbers in the order of an epoch, over all ranks, round-robin over the partitions."""

    def __init__(self, parts: Sequence[OrderedPart]) -> None:
        self._parts = parts

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __getitem__(self, places: slice) -> Records:
        start, stop, _ = places.indices(len(self))
        numbers, partitions = np.empty(max(0, stop - start), np.int64), len(self._parts)
        for number in range(partitions):
            part = range(places_in(start, number, partitions), places_in(stop, number, partitions))
            numbers[(number - start) % partitions :: partitions] = self.batch({number: part})
        return numbers

    def batch(self, places: Mapping[int, range]) -> Records:
        """Return the record numbers at these places of each partition, concatenated."""
        found = [self._parts[number][part.start : part.stop] for number, part in places.items()]
        return found[0] if len(found) == 1 else np.concatenate(found)

    def each(self, places: Iterable[int]) -> Iterator[int]:
        if len(self._parts) == 1:
            yield from self._parts[0].each(places)
            return
        for place in places:
            row, number = divmod(place, len(self._parts))
            yield from self._parts[number].each((row,))

    def closed(self, omission: Omission, epoch: int) -> EpochOrder:
        """Return this single-partition order without the omitted records; later ones move up."""
        (part,) = self._parts
        return EpochOrder([ClosedOrder(part, len(omission), lambda: omission.gaps(part, epoch))])

    def passing(self, ranges: Ranges) -> EpochOrder:
        """Return this order without these ascending ranges of places, which are whole steps."""
        partitions = len(self._parts)

        def gaps(number: int) -> Records:
            own = (tuple(places_in(each, number, partitions) for each in both) for both in ranges)
            return np.concatenate([np.arange(start, stop) for start, stop in own])

        closed = (ClosedOrder(part, len(gaps(n)), partial(gaps, n)) for n, part in enumerate(self._parts))
        return EpochOrder(list(closed))


def epoch_order(shard_counts: Sequence[int], *, shuffle: Shuffle | None, seed: int, epoch: int) -> EpochOrder:
    """Return the epoch's order over all ranks, each record number once; stored order without a ``shuffle``.

    Raises UsageError above MAX_RECORDS.
    """
    records = sum(shard_counts)
    if records > MAX_RECORDS:
        raise UsageError(f"{records} records are more than one order can hold ({MAX_RECORDS})")
    if shuffle is None:
        bits = keyed_bits(Purpose.RECORD_ORDER, seed=seed, epoch=epoch)
        return EpochOrder([DisplacedOrder(records, window=1, bits=bits)])
    window = partition_window(shuffle, records)
    parts = dealt(shard_counts, shuffle.partitions)
    return EpochOrder([part.order(window, seed=seed, epoch=epoch) for part in parts])


def shard_order(
    shard_counts: Sequence[int], *, shuffle: Shuffle | None, seed: int, epoch: int, partitions: range
) -> npt.NDArray[np.int64] | None:
    """Return the order in which these partitions' shards are read; None if any may be read at any time."""
    if shuffle is None:
        return np.arange(len(shard_counts), dtype=np.int64)
    window = partition_window(shuffle, sum(shard_counts))
    parts = dealt(shard_counts, shuffle.partitions)[partitions.start : partitions.stop]
    if any(window >= part.records for part in parts):
        return None
    runs = [(part, part.runs(window, seed=seed, epoch=epoch)) for part in parts]
    begins = np.concatenate([np.cumsum(part.counts[run]) - part.counts[run] for part, run in runs])
    read = np.concatenate([part.shards[run] for part, run in runs])[np.argsort(begins, kind="stable")]
    _, first_reads = np.unique(read, return_index=True)  # a shard may have records in two partitions
    shards: npt.NDArray[np.int64] = read[np.sort(first_reads)]
    return shards


def partition_window(shuffle: Shuffle, records: int) -> int:
    """Return the window within one partition, in places."""
    return math.ceil(shuffle.window_of(records) / shuffle.partitions)


@dataclass(frozen=True)
class RankSplit:
    """The batches of one rank, as ranges of places in the epoch's order.

    A global step takes ``world_size * batch_size`` places; rank r has the r-th ``batch_size`` of them.
    Without ``drop_last``, the places after the last full step are split as evenly as possible. An epoch can
    continue from ``start``, the end of a global step of any world size.
    """

    records: int
    batch_size: int
    rank: int = 0
    world_size: int = 1
    drop_last: bool = False
    start: int = 0
    step_records: int = field(init=False, repr=False)  # of all ranks
    full_steps: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        checked_int(self.batch_size, "batch_size", least=1)
        if not 0 <= self.rank < self.world_size:
            raise UsageError(f"rank must be between 0 and {self.world_size - 1}, not {self.rank}")
        if not 0 <= self.start <= self.records:
            raise UsageError(f"an epoch of {self.records} records cannot continue at {self.start}")
        object.__setattr__(self, "step_records", self.world_size * self.batch_size)
        object.__setattr__(self, "full_steps", (self.records - self.start) // self.step_records)

    @property
    def stop(self) -> int:
        """The place where the epoch ends for all ranks; with ``drop_last`` it may be before ``records``."""
        return self._remainder_start if self.drop_last else self.records

    def __len__(self) -> int:
        return self.full_steps + (not self.drop_last and len(self._remainder) > 0)

    def batch(self, step: int) -> range:
        """Return the places of this rank's batch of a step of 0 .. len - 1, counted from ``start``."""
        if step == self.full_steps:
            return self._remainder
        first = self.start + step * self.step_records + self.rank * self.batch_size
        return range(first, first + self.batch_size)

    def end(self, step: int) -> int:
        """Return the place that all ranks have reached after this step; a state stores it as ``start``."""
        return min(self.start + (step + 1) * self.step_records, self.stop)

    def steps_of(self, places: Records) -> Records:
        """Return the step of each place; -1 for places of other ranks or outside all steps."""
        steps, within = np.divmod(places - self.start, self.step_records)
        first = self.rank * self.batch_size
        is_own = (within >= first) & (within < first + self.batch_size)
        steps[~is_own | (steps < 0) | (steps >= self.full_steps)] = -1
        if not self.drop_last:
            rest = self._remainder
            steps[(places >= rest.start) & (places < rest.stop)] = self.full_steps
        return steps

    def steps_reached(self, places: Records) -> Records:
        """Return the global step that contains each place, clipped to the epoch's steps."""
        return np.clip((places - self.start) // self.step_records, 0, max(0, len(self) - 1))

    @property
    def _remainder_start(self) -> int:
        return self.start + self.full_steps * self.step_records

    @property
    def _remainder(self) -> range:
        share, extra = divmod(self.records - self._remainder_start, self.world_size)
        first = self._remainder_start + self.rank * share + min(self.rank, extra)
        return range(first, first + share + (self.rank < extra))


class EpochSplit:
    """The batches of one rank, as places in the partitions of an epoch's order.

    Every partition supplies an equal share of each global step. A rank takes the shares of adjacent
    partitions, or an equal part of one partition's share, so a global step has the same records for any
    number of ranks. ``whole`` splits the epoch's places. Raises UsageError for unequal shares.
    """

    def __init__(self, whole: RankSplit, partitions: int) -> None:
        world_size, batch_size = whole.world_size, whole.batch_size
        sharing, owned = max(1, world_size // partitions), max(1, partitions // world_size)
        if owned * world_size != sharing * partitions:
            sizes = [str(n) for n in range(1, partitions) if partitions % n == 0]
            raise UsageError(
                f"{partitions} partitions cannot be shared equally by {world_size} ranks; use a world_size "
                f"of {', '.join(sizes)} or a multiple of {partitions}, or another number of partitions"
            )
        if batch_size % owned:
            below = batch_size // owned * owned
            sizes = [str(size) for size in (below, below + owned) if size]
            raise UsageError(
                f"a batch_size of {batch_size} cannot be shared equally by the {owned} partitions of "
                f"each of {world_size} ranks; use {' or '.join(sizes)}"
            )
        first = whole.rank * partitions // world_size
        self.whole = whole
        self.partitions = range(first, first + owned)
        self.parts = {
            number: replace(
                whole,
                records=places_in(whole.records, number, partitions),
                batch_size=batch_size // owned,
                rank=whole.rank % sharing,
                world_size=sharing,
                start=places_in(whole.start, number, partitions),
            )
            for number in self.partitions
        }
        self._steps = len(whole) if whole.drop_last else max(map(len, self.parts.values()))

    def __len__(self) -> int:
        return self._steps

    def places(self, step: int) -> dict[int, range]:
        """Return the places of this rank's batch of a step, by partition. Raises IndexError."""
        if not 0 <= step < self._steps:
            raise IndexError(f"there is no step {step} among {self._steps} steps, counted from 0")
        return {number: part.batch(step) for number, part in self.parts.items() if step < len(part)}
