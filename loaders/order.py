"""The order of an epoch: a pure function of record numbers, and who gets which part of it.

A record number is a position in the dataset's index. No payload is touched, so that the order of
1.28 million records takes 30 ms, whatever the window, and its state is one number.

All randomness is raw 64-bit Philox output, and all sorting is of unique integers: the order is the
same on every platform and with every numpy.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..formats.errors import UsageError
from .rng import Purpose, keyed_bits
from .sizes import byte_count

Records = npt.NDArray[np.int64]

MAX_RECORDS = (1 << 31) - 1  # a sort key holds a record's position, its new place and a fraction of one


class Shuffle(ABC):
    """How far a record may move from its stored place. Frozen, picklable, equal by value."""

    @abstractmethod
    def in_records(self, mean_record_bytes: float) -> Shuffle:
        """The same shuffle with its window counted in records, of this mean size."""

    @abstractmethod
    def window_of(self, records: int) -> int:
        """The window over a dataset of this many records: ``records`` for a full permutation."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """What tells this shuffle from others in a loader's state; :func:`shuffle_from_json` reads it."""


@dataclass(frozen=True)
class GlobalShuffle(Shuffle):
    """A permutation of the whole dataset: the best shuffle, and random reads."""

    def in_records(self, mean_record_bytes: float) -> GlobalShuffle:
        return self

    def window_of(self, records: int) -> int:
        return records

    def to_json(self) -> dict[str, Any]:
        return {"kind": "global"}


@dataclass(frozen=True)
class LocalShuffle(Shuffle):
    """Shards in random order, their records displaced by less than ``window`` places of that stream.

    ``window`` is a number of records or of bytes (``"2GiB"``, ``"512MB"``). What is not yet
    delivered never spans more than ``window`` places up to the last one that is: so far apart are
    the reads of any moment. Away from both ends a record moves by up to half the window either
    way, a quarter on average. Nothing waits for the window to fill, and it drains at the end.
    A window of the dataset's size or more is a :class:`GlobalShuffle`.
    """

    window: int | str

    def __post_init__(self) -> None:
        if hasattr(self.window, "__index__"):  # numpy's integers, too
            object.__setattr__(self, "window", operator.index(self.window))
        if _amount(self.window) < 1:
            raise UsageError(f"a shuffle window must be at least 1, not {self.window!r}")

    def in_records(self, mean_record_bytes: float) -> LocalShuffle:
        if isinstance(self.window, int):
            return self
        return LocalShuffle(max(1, int(_amount(self.window) / max(1.0, mean_record_bytes))))

    def window_of(self, records: int) -> int:
        if not isinstance(self.window, int):
            raise UsageError(f"a window of {self.window!r} counts no records before in_records() was asked")
        return min(self.window, records)

    def to_json(self) -> dict[str, Any]:
        return {"kind": "local", "window": self.window}


def shuffle_from_json(value: dict[str, Any] | None) -> Shuffle | None:
    """The shuffle that ``to_json`` described; None is stored order. Raises UsageError."""
    match value:
        case None:
            return None
        case {"kind": "global"}:
            return GlobalShuffle()
        case {"kind": "local", "window": int() | str() as window}:
            return LocalShuffle(window)
    raise UsageError(f"not a shuffle: {value!r}")


def epoch_order(shard_counts: Sequence[int], *, shuffle: Shuffle | None, seed: int, epoch: int) -> Records:
    """Every record number of the dataset once, in the order of this epoch, over all ranks.

    ``shard_counts`` are the shards' record counts in stored order; None for ``shuffle`` gives
    stored order. Deterministic. Raises UsageError above MAX_RECORDS.
    """
    records = sum(shard_counts)
    if records > MAX_RECORDS:
        raise UsageError(f"{records} records are more than one order can hold ({MAX_RECORDS})")
    if shuffle is None:
        return np.arange(records, dtype=np.int64)
    window = shuffle.window_of(records)
    order = displaced(records, window=window, bits=keyed_bits(Purpose.RECORD_ORDER, seed=seed, epoch=epoch))
    shards = shard_order(shard_counts, shuffle=shuffle, seed=seed, epoch=epoch)
    if shards is None:
        return order
    stream: Records = _shard_stream(shard_counts, shards)[order]
    return stream


def shard_order(
    shard_counts: Sequence[int], *, shuffle: Shuffle | None, seed: int, epoch: int
) -> npt.NDArray[np.int64] | None:
    """The order in which the epoch reads the shards through; None where it reads all over the dataset."""
    if shuffle is None:
        return np.arange(len(shard_counts), dtype=np.int64)
    records = sum(shard_counts)
    if shuffle.window_of(records) == records:
        return None
    bits = keyed_bits(Purpose.SHARD_ORDER, seed=seed, epoch=epoch)
    return displaced(len(shard_counts), window=len(shard_counts), bits=bits)


def _shard_stream(shard_counts: Sequence[int], shards: npt.NDArray[np.int64]) -> Records:
    """The record numbers of all shards one after the other, in this order."""
    counts = np.asarray(shard_counts, np.int64)
    first_records = np.cumsum(counts) - counts
    places = np.cumsum(counts[shards]) - counts[shards]
    stream = np.repeat(first_records[shards] - places, counts[shards])
    stream += np.arange(len(stream), dtype=np.int64)
    return stream


def displaced(count: int, *, window: int, bits: np.random.Philox) -> Records:
    """0 .. count - 1 ordered by i + window * u, with u uniform in [0, 1) for each i.

    One 64-bit key per record holds that sum as a fixed-point number, and below it i itself, which
    breaks ties and is what remains. A window of ``count`` orders by u alone.
    """
    index_bits = count.bit_length()
    positions = np.arange(count, dtype=np.uint64)
    keys = bits.random_raw(count)
    if window < count:
        fraction_bits = min(32, 63 - 2 * index_bits)
        keys >>= np.uint64(32)
        keys *= np.uint64(window)
        keys >>= np.uint64(32 - fraction_bits)
        keys += positions << np.uint64(fraction_bits)
    keys <<= np.uint64(index_bits)
    keys |= positions
    keys.sort()
    keys &= np.uint64((1 << index_bits) - 1)
    return keys.view(np.int64)


@dataclass(frozen=True)
class RankSplit:
    """The batches of one rank, as ranges of places in the epoch's order.

    A global step takes ``world_size * batch_size`` places, of which rank r has the r-th
    ``batch_size``. ``drop_last`` ends with the last full step, the same number for every rank;
    otherwise the places that remain are split as evenly as they can be, the lower ranks having one
    more, and a rank that gets none has one batch less. ``start``, the end of some global step of
    any world size, continues an epoch from there.
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
        """The place that all ranks have reached after this step: what a state keeps as ``start``."""
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
    """The number of records, or of bytes, that a window means. Raises UsageError."""
    if isinstance(window, int):
        return window
    return byte_count(window, of="a shuffle window")
