"""The order of an epoch, a pure function of record numbers, and each rank's part of it.

A record number is a position in the dataset's index. No record is read, the state is one number, and what is
computed at a time is a window of the order.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import UsageError
from shardprep.formats.system.sizes import byte_count

from .displaced_order import MAX_RECORDS, DisplacedOrder, RecordRuns, permutation
from .rng import Purpose, keyed_bits


class Shuffle(ABC):
    """A shuffle: how far a record may move from its stored place. Frozen, picklable, equal by value."""

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
    or more is the same as a :class:`GlobalShuffle`. Raises UsageError for a window below 1.
    """

    window: int | str

    def __post_init__(self) -> None:
        if hasattr(self.window, "__index__"):  # also numpy's integers
            object.__setattr__(self, "window", operator.index(self.window))
        if _amount(self.window) < 1:
            raise UsageError(f"a shuffle window must be at least 1, not {self.window!r}")

    def in_records(self, mean_record_bytes: float) -> LocalShuffle:
        if isinstance(self.window, int):
            return self
        return LocalShuffle(max(1, int(_amount(self.window) / max(1.0, mean_record_bytes))))

    def window_of(self, records: int) -> int:
        if not isinstance(self.window, int):
            raise UsageError(f"a window of {self.window!r} has no number of records before in_records()")
        return min(self.window, records)

    def to_json(self) -> dict[str, Any]:
        return {"kind": "local", "window": self.window}


def epoch_order(
    shard_counts: Sequence[int], *, shuffle: Shuffle | None, seed: int, epoch: int
) -> DisplacedOrder:
    """Return the order of this epoch, over all ranks: every record number of the dataset once.

    ``shard_counts`` are the shards' record counts in stored order; a ``shuffle`` of None gives stored order.
    Deterministic. Raises UsageError above MAX_RECORDS.
    """
    records = sum(shard_counts)
    if records > MAX_RECORDS:
        raise UsageError(f"{records} records are more than one order can hold ({MAX_RECORDS})")
    shards = shard_order(shard_counts, shuffle=shuffle, seed=seed, epoch=epoch)
    return DisplacedOrder(
        records,
        window=shuffle.window_of(records) if shuffle else 1,
        bits=keyed_bits(Purpose.RECORD_ORDER, seed=seed, epoch=epoch),
        stream=None if shards is None or shuffle is None else RecordRuns.of_shards(shard_counts, shards).part,
    )


def shard_order(
    shard_counts: Sequence[int], *, shuffle: Shuffle | None, seed: int, epoch: int
) -> npt.NDArray[np.int64] | None:
    """The order in which the epoch reads the shards; None where it reads from all of them at any time."""
    if shuffle is None:
        return np.arange(len(shard_counts), dtype=np.int64)
    records = sum(shard_counts)
    if shuffle.window_of(records) == records:
        return None
    bits = keyed_bits(Purpose.SHARD_ORDER, seed=seed, epoch=epoch)
    return permutation(len(shard_counts), bits)


@dataclass(frozen=True)
class RankSplit:
    """The batches of one rank, as ranges of places in the epoch's order.

    A global step takes ``world_size * batch_size`` places, of which rank r has the r-th ``batch_size``. With
    ``drop_last`` the epoch ends with the last full step, the same number for every rank. Otherwise the places
    that remain are split as evenly as possible, the lower ranks having one more, and a rank that gets none
    has one batch less. ``start`` continues an epoch at the end of a global step of any world size.
    """

    records: int
    batch_size: int
    rank: int = 0
    world_size: int = 1
    drop_last: bool = False
    start: int = 0

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise UsageError(f"batch_size must be at least 1, not {self.batch_size}")
        if not 0 <= self.rank < self.world_size:
            raise UsageError(f"rank must be between 0 and {self.world_size - 1}, not {self.rank}")
        if not 0 <= self.start <= self.records:
            raise UsageError(f"an epoch of {self.records} records cannot continue at {self.start}")

    @property
    def stop(self) -> int:
        """The place where the epoch ends for all ranks: ``records``, or less with ``drop_last``."""
        return self._remainder_start if self.drop_last else self.records

    def __len__(self) -> int:
        return self._full_steps + (not self.drop_last and len(self._remainder) > 0)

    def batch(self, step: int) -> range:
        """The places of this rank's batch of this step, counted from ``start``. Raises IndexError."""
        if not 0 <= step < len(self):
            raise IndexError(f"step {step} of {len(self)}")
        if step == self._full_steps:
            return self._remainder
        first = self.start + step * self._step_records + self.rank * self.batch_size
        return range(first, first + self.batch_size)

    def end(self, step: int) -> int:
        """The place that all ranks have reached after this step; a state keeps it as ``start``."""
        return min(self.start + (step + 1) * self._step_records, self.stop)

    @property
    def _step_records(self) -> int:
        return self.world_size * self.batch_size

    @property
    def _full_steps(self) -> int:
        return (self.records - self.start) // self._step_records

    @property
    def _remainder_start(self) -> int:
        return self.start + self._full_steps * self._step_records

    @property
    def _remainder(self) -> range:
        share, extra = divmod(self.records - self._remainder_start, self.world_size)
        first = self._remainder_start + self.rank * share + min(self.rank, extra)
        return range(first, first + share + (self.rank < extra))


def _amount(window: int | str) -> float:
    """The number of records, or of bytes, of a window. Raises UsageError."""
    if isinstance(window, int):
        return window
    return byte_count(window, of="a shuffle window")
