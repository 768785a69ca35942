"""The order of an epoch, a pure function of record numbers.

A record number is a position in the dataset's index. No record is read, the state is one number, and what is
computed at a time is a window of the order.
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import UsageError
from shardprep.formats.system.sizes import byte_count

from .displaced_order import MAX_RECORDS, DisplacedOrder, Records
from .partitions import dealt, places_in
from .rng import Purpose, keyed_bits


class Shuffle(ABC):
    """A shuffle: how far a record may move from its stored place. Frozen, picklable, equal by value.

    It works on each of ``partitions`` of the shards by itself.
    """

    partitions: int = 1

    @abstractmethod
    def in_records(self, mean_record_bytes: float) -> Shuffle:
        """Return the same shuffle with its window counted in records of this mean size."""

    @abstractmethod
    def window_of(self, records: int) -> int:
        """The window over a dataset of so many records: ``records`` for a full permutation."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Return the shuffle as JSON values, for a loader's state; :func:`shuffle_from_json` reads it."""


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
    """Shards in random order, their records displaced by less than ``window`` places of that stream.

    ``window`` is a number of records, or a size in bytes as text (``"2GiB"``, ``"512MB"``). At any moment the
    reads are at most ``window`` places apart. Away from both ends a record moves by up to half the window in
    either direction, a quarter on average, with a standard deviation of 0.29 windows: a window of 3 n spreads
    as far as tensorpack's buffer of n. There is no delay to fill the window. A window of the dataset's size
    or more is the same as a :class:`GlobalShuffle`, of each partition where there are several.

    With ``partitions`` a rank reads only shards of its own, the same in every epoch and for every seed. The
    shards are dealt to so many partitions of equally many records (a shard at a cut is in two). Each is
    shuffled by itself, in its share of the window, and each gives the same share of every global step. So the
    global steps are the same for any number of ranks that divides the number of partitions, or is a multiple
    of it; other numbers of ranks, and batch sizes that give partitions unequal shares, are errors of the
    Loader. By default every rank reads every shard.

    Raises UsageError for a window or partitions below 1.
    """

    window: int | str
    partitions: int = 1

    def __post_init__(self) -> None:
        if hasattr(self.window, "__index__"):  # also numpy's integers
            object.__setattr__(self, "window", operator.index(self.window))
        if _amount(self.window) < 1:
            raise UsageError(f"a shuffle window must be at least 1, not {self.window!r}")
        if not hasattr(self.partitions, "__index__") or operator.index(self.partitions) < 1:
            raise UsageError(f"a shuffle's partitions must be at least 1, not {self.partitions!r}")
        object.__setattr__(self, "partitions", operator.index(self.partitions))

    def __repr__(self) -> str:  # the states of flows have it
        partitions = f", partitions={self.partitions}" if self.partitions > 1 else ""
        return f"LocalShuffle(window={self.window!r}{partitions})"

    def in_records(self, mean_record_bytes: float) -> LocalShuffle:
        if isinstance(self.window, int):
            return self
        return replace(self, window=max(1, int(_amount(self.window) / max(1.0, mean_record_bytes))))

    def window_of(self, records: int) -> int:
        if not isinstance(self.window, int):
            raise UsageError(f"a window of {self.window!r} has no number of records before in_records()")
        return min(self.window, records)

    def to_json(self) -> dict[str, Any]:
        values = {"kind": "local", "window": self.window}
        return values if self.partitions == 1 else values | {"partitions": self.partitions}


def shuffle_from_json(value: object) -> Shuffle | None:
    """Return the shuffle of which ``to_json`` made the value; None for None.

    Raises ValueError, or UsageError.
    """
    match value:
        case None:
            return None
        case {"kind": "global", **rest} if not rest:
            return GlobalShuffle()
        case {"kind": "local", "window": int() as window, **rest} if rest.keys() <= {"partitions"}:
            shuffle = LocalShuffle(window, **cast("dict[str, int]", rest))
            if shuffle.to_json() == value:
                return shuffle
    raise ValueError(f"{value!r} is not a shuffle")


class EpochOrder:
    """All record numbers in the order of an epoch, over all ranks: one of each partition in turn.

    Place i is place i // P of partition i % P, for P partitions. A window of each is computed at a time.
    """

    def __init__(self, parts: Sequence[DisplacedOrder]) -> None:
        self._parts = parts

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __getitem__(self, places: slice) -> Records:
        """Return the record numbers at adjacent places."""
        start, stop, _ = places.indices(len(self))
        numbers, partitions = np.empty(max(0, stop - start), np.int64), len(self._parts)
        for number in range(partitions):
            part = range(places_in(start, number, partitions), places_in(stop, number, partitions))
            numbers[(number - start) % partitions :: partitions] = self.batch({number: part})
        return numbers

    def batch(self, places: Mapping[int, range]) -> Records:
        """Return the record numbers at these places of partitions, one partition after the other."""
        found = [self._parts[number][part.start : part.stop] for number, part in places.items()]
        return found[0] if len(found) == 1 else np.concatenate(found)

    def each(self, places: Iterable[int]) -> Iterator[int]:
        """Yield the record number at each of these places; see :meth:`DisplacedOrder.each`."""
        if len(self._parts) == 1:
            yield from self._parts[0].each(places)
            return
        for place in places:
            row, number = divmod(place, len(self._parts))
            yield from self._parts[number].each((row,))


def epoch_order(shard_counts: Sequence[int], *, shuffle: Shuffle | None, seed: int, epoch: int) -> EpochOrder:
    """Return the order of this epoch, over all ranks: every record number of the dataset once.

    ``shard_counts`` are the shards' record counts in stored order; a ``shuffle`` of None gives stored order.
    Deterministic. Raises UsageError above MAX_RECORDS.
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
    """The order in which the epoch reads the shards of these partitions, those of several side by side.

    None where it reads from all shards of a partition at any time.
    """
    if shuffle is None:
        return np.arange(len(shard_counts), dtype=np.int64)
    window = partition_window(shuffle, sum(shard_counts))
    parts = dealt(shard_counts, shuffle.partitions)[partitions.start : partitions.stop]
    if any(window >= part.records for part in parts):
        return None
    runs = [part.runs(window, seed=seed, epoch=epoch) for part in parts]
    begins = [np.cumsum(part.counts[run]) - part.counts[run] for part, run in zip(parts, runs, strict=True)]
    read = np.concatenate([part.shards[run] for part, run in zip(parts, runs, strict=True)])
    read = read[np.argsort(np.concatenate(begins), kind="stable")]
    _, first_reads = np.unique(read, return_index=True)  # a shard may have records in two partitions
    shards: npt.NDArray[np.int64] = read[np.sort(first_reads)]
    return shards


def partition_window(shuffle: Shuffle, records: int) -> int:
    """The window in places of one partition, of which there are fewer by their number."""
    return math.ceil(shuffle.window_of(records) / shuffle.partitions)


def _amount(window: int | str) -> float:
    """The number of records, or of bytes, of a window. Raises UsageError."""
    if isinstance(window, int):
        return window
    return byte_count(window, of="a shuffle window")
