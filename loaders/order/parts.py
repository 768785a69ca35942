"""Building blocks of an epoch's order: window shuffles, partitions, weighted parts, and omitted records.

A window shuffle sorts the numbers i by i + window * u, with u random in [0, 1). Any block can be computed
alone, from a block and a window of random numbers. All randomness is raw 64-bit Philox output, and only
unique integers are sorted, so the order is the same on every platform and with every numpy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import cycle, pairwise
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import UsageError
from shardprep.formats.runtime.owners import cached_property
from shardprep.formats.runtime.progress import is_number
from shardprep.loaders.order.rng import Purpose, keyed_bits

Records = npt.NDArray[np.int64]
Stream = Callable[[int, int], Records]
NO_RECORDS: Records = np.empty(0, np.int64)

Ranges = tuple[tuple[int, int], ...]

MAX_RECORDS = (1 << 31) - 1  # a 64-bit sort key holds a record's position, its new place and a fraction
BLOCK = 1 << 16  # places, sorted within the CPU cache in 1 ms
KEPT_BLOCKS = 3  # that nearby places fall into, in whatever order they are requested
WORDS_PER_STEP = 4  # of Philox's counter


class OrderBlock(NamedTuple):
    start: int
    stop: int
    numbers: Records


class DisplacedOrder:
    """0 .. ``count`` - 1 ordered by i + ``window`` * u, with u uniform in [0, 1) for each i.

    ``bits`` supplies the u, from its current state on. With a ``stream``, a function of (start, stop), the
    numbers are its values at each i. Blocks are computed on demand. Not thread-safe.
    """

    def __init__(
        self,
        count: int,
        *,
        window: int,
        bits: np.random.Philox,
        stream: Stream | None = None,
        block: int = BLOCK,
    ) -> None:
        self._count = count
        self._window = window
        self._bits = bits
        self._start_state = bits.state
        self._stream = stream
        self._block_size = max(block, window)
        self._computed = 0
        self._recent_blocks: dict[int, OrderBlock] = {}

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, places: slice) -> Records:
        """Return the numbers at adjacent places; read-only."""
        start, stop, _ = places.indices(self._count)
        parts = []
        while start < stop:
            block = self._block_of(start)
            parts.append(block.numbers[start - block.start : stop - block.start])
            start = block.stop
        return parts[0] if len(parts) == 1 else np.concatenate([NO_RECORDS, *parts])

    def numbers_at(self, places: Iterable[int]) -> Iterator[int]:
        """Yield the number at each of these places, in any order.

        After computing twice as many blocks as the order has, it is held whole: 8 bytes per number.
        """
        start = stop = 0
        for place in places:
            if not start <= place < stop:
                if self._computed * self._block_size > 2 * (self._count + self._window):
                    self._block_size, self._computed, self._recent_blocks = self._count + self._window, 0, {}
                block = self._block_of(place)
                start, stop, item = block.start, block.stop, block.numbers.item
            yield item(place - start)

    def _block_of(self, place: int) -> OrderBlock:
        """The block of a place: T - window to T places precede a threshold T, and a block spans a window."""
        number = place // self._block_size
        block = self._cached_block(number)
        return block if place < block.stop else self._cached_block(number + 1)

    def _cached_block(self, number: int) -> OrderBlock:
        block = self._recent_blocks.pop(number, None) or self._compute_block(number)
        self._recent_blocks[number] = block
        if len(self._recent_blocks) > KEPT_BLOCKS:
            del self._recent_blocks[next(iter(self._recent_blocks))]  # the least recently used
        return block

    def _compute_block(self, number: int) -> OrderBlock:
        """Sort 64-bit keys: i + window * u as a fixed-point number in the high bits, i in the low bits."""
        self._computed += 1
        first = number * self._block_size
        end = min(first + self._block_size, self._count + self._window)
        lowest, beyond = max(0, first - self._window + 1), min(self._count, end)
        start = lowest  # the place of the block's first number
        if self._window == 1:
            order = np.arange(lowest, beyond, dtype=np.int64)
        else:
            index_bits = self._count.bit_length()
            positions = np.arange(lowest, beyond, dtype=np.uint64)
            self._bits.state = self._start_state
            steps, rest = divmod(lowest, WORDS_PER_STEP)
            self._bits.advance(steps)
            keys = self._bits.random_raw(beyond - WORDS_PER_STEP * steps)[rest:]
            if self._window < self._count:
                fraction_bits = min(32, 63 - 2 * index_bits)
                keys >>= np.uint64(32)
                keys *= np.uint64(self._window)
                keys >>= np.uint64(32 - fraction_bits)
                keys += positions << np.uint64(fraction_bits)
                reached = keys >= np.uint64(first << fraction_bits)
                start += int(np.count_nonzero(~reached))
                inside = reached & (keys < np.uint64(end << fraction_bits))
                keys, positions = keys[inside], positions[inside]
            keys <<= np.uint64(index_bits)
            keys |= positions
            keys.sort()
            keys &= np.uint64((1 << index_bits) - 1)
            order = keys.view(np.int64)
        numbers = order if self._stream is None else self._stream(lowest, beyond)[order - lowest]
        numbers.flags.writeable = False
        return OrderBlock(start, start + len(numbers), numbers)


def permutation(count: int, bits: np.random.Philox) -> Records:
    """Return 0 .. ``count`` - 1 in random order."""
    return DisplacedOrder(count, window=count, bits=bits)[:]


@dataclass(frozen=True, eq=False)
class Partition:
    """Partition ``number`` of ``total``: a run of adjacent records of each of ``shards``, as stored."""

    number: int
    total: int
    shards: Records
    firsts: Records
    counts: Records

    @property
    def records(self) -> int:
        return int(self.counts.sum())

    def order(self, window: int, *, seed: int, epoch: int) -> DisplacedOrder:
        """Return the partition's records in the epoch's order, displaced by less than ``window`` places.

        A window of 0 is the stored order.
        """
        runs = self.runs(window, seed=seed, epoch=epoch)
        is_all = self.total == 1 and not 0 < window < self.records
        return DisplacedOrder(
            self.records,
            window=max(1, min(window, self.records)),
            bits=keyed_bits(Purpose.RECORD_ORDER, seed=seed, epoch=epoch, item=self.number),
            stream=None if is_all else _stream_of(self.firsts[runs], self.counts[runs]),
            block=math.ceil(BLOCK / self.total),  # a rank may hold a block of each partition
        )

    def runs(self, window: int, *, seed: int, epoch: int) -> npt.NDArray[np.int64]:
        """Return the order of the runs before the shuffle: random, unless the window is 0 or covers all."""
        if not 0 < window < self.records:
            return np.arange(len(self.shards))
        bits = keyed_bits(Purpose.SHARD_ORDER, seed=seed, epoch=epoch, item=self.number)
        return permutation(len(self.shards), bits)


def partition_shards(shard_counts: Sequence[int], partitions: int) -> list[Partition]:
    """Return the partitions of shards with these record counts, in stored order.

    The shards are laid out in an order that depends only on how many there are, and this row is cut:
    partition p gets one record for each of the places p, p + partitions, ... of an epoch.
    """
    counts = np.asarray(shard_counts, np.int64)
    firsts = np.cumsum(counts) - counts
    if partitions == 1:
        return [Partition(0, 1, np.arange(len(counts)), firsts, counts)]
    row = permutation(len(counts), keyed_bits(Purpose.PARTITION, seed=0, epoch=0))
    row = row[counts[row] > 0]
    ends = np.cumsum(counts[row])
    cuts = np.cumsum([0, *(partition_share(int(counts.sum()), n, partitions) for n in range(partitions))])
    parts = []
    for number, (start, stop) in enumerate(pairwise(cuts)):
        inside = slice(np.searchsorted(ends, start, side="right"), np.searchsorted(ends, stop) + 1)
        shards, begins = row[inside], ends[inside] - counts[row[inside]]
        starts, stops = np.maximum(begins, start), np.minimum(ends[inside], stop)
        stored = np.argsort(shards)
        runs = shards, firsts[shards] + starts - begins, stops - starts
        parts.append(Partition(number, partitions, *(values[stored] for values in runs)))
    return parts


def partition_share(places: int, partition: int, partitions: int) -> int:
    """Return how many of the first ``places`` of an epoch's order belong to this partition, round-robin."""
    return len(range(partition, places, partitions))


def _stream_of(firsts: Records, counts: Records) -> Stream:
    """The record numbers of consecutive runs, each of ``counts`` records starting at ``firsts``."""
    ends = np.cumsum(counts)
    offsets = firsts - (ends - counts)

    def stream(start: int, stop: int) -> Records:
        first, last = np.searchsorted(ends, start, side="right"), np.searchsorted(ends, stop, side="left")
        runs = slice(int(first), int(last) + 1)
        numbers = np.repeat(offsets[runs], np.diff(np.minimum(ends[runs], stop), prepend=start))
        numbers += np.arange(start, stop, dtype=np.int64)
        return numbers

    return stream


@dataclass(frozen=True)
class WeightedParts:
    """An epoch with one place per record, shared among the parts by weight.

    From epoch to epoch a part's places cycle through its ``records``, so the times that any two of its
    records come differ by at most one.
    """

    records: tuple[int, ...]
    places: tuple[int, ...]

    @classmethod
    def of(cls, weights: object, names: Sequence[str], records: Sequence[int]) -> Self:
        """Share out the places by largest remainder. Raises UsageError for invalid weights."""
        if not isinstance(weights, Mapping) or set(weights) != set(names):
            parts = f"a dict with one number for each of {', '.join(names)}"
            raise UsageError(f"weights must be {parts}; to weight records, draw their numbers in a Flow")
        for name in names:
            if not is_number(weights[name]) or weights[name] <= 0:
                raise UsageError(f"the weight of {name} must be a number above 0, not {weights[name]!r}")
        places = apportion(sum(records), [Fraction(float(weights[name])) for name in names])
        for name, count, own in zip(names, places, records, strict=True):
            if not count or not own:
                raise UsageError(
                    f"the weights leave no place in an epoch for {name}, which has {own} chosen records"
                )
        return cls(tuple(records), places)

    def positions(self, places: Records, epoch: int) -> Records:
        """Return the stored positions, among all records, of the records at these places of the epoch."""
        ends = np.cumsum(np.array(self.places, np.int64))
        parts = np.searchsorted(ends, places, side="right")
        own = np.array(self.records, np.int64)
        turns = [epoch * count % size for count, size in zip(self.places, self.records, strict=True)]
        begins = np.array(turns, np.int64) - ends + self.places
        inside: Records = places + begins[parts]
        inside %= own[parts]
        inside += (np.cumsum(own) - own)[parts]
        return inside

    def blocks(self, counts: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Return the sizes of the blocks an epoch reads together, given the records of each part's shards."""
        blocks = list[int]()
        for own, places in zip(counts, self.places, strict=True):
            left, turns = places, cycle(count for count in own if count)
            while left:
                blocks.append(min(next(turns), left))
                left -= blocks[-1]
        return tuple(blocks)


def apportion(total: int, shares: Sequence[Fraction]) -> tuple[int, ...]:
    """Return whole numbers that add up to ``total``, by largest remainder; ties favour the first."""
    quotas = [total * share / sum(shares) for share in shares]
    counts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda at: counts[at] - quotas[at])
    for at in by_remainder[: total - sum(counts)]:
        counts[at] += 1
    return tuple(counts)


SCANNED_PLACES = 1 << 18  # places computed at a time


@dataclass(frozen=True, eq=False)
class Omission:
    """Records that no epoch delivers, as ``positions`` in stored order: int64, ascending and unique.

    If it ``closes_gaps``, later records move up. With ``weights``, their places differ between epochs.
    """

    positions: Records
    closes_gaps: bool
    weights: WeightedParts | None = None

    def __len__(self) -> int:
        return len(self.positions)

    def mask_at(self, places: Records, epoch: int) -> npt.NDArray[np.bool_]:
        """Return a mask of the places of an epoch that have an omitted record."""
        positions = self.weights.positions(places, epoch) if self.weights else places
        return self._position_mask[np.minimum(positions, len(self._position_mask) - 1)]

    @cached_property
    def _position_mask(self) -> npt.NDArray[np.bool_]:
        """Whether each position is omitted, up to the one after the last."""
        mask = np.zeros(int(self.positions.max(initial=-1)) + 2, np.bool_)
        mask[self.positions] = True
        return mask

    def find_gaps(self, order: PartOrder, epoch: int) -> Records:
        """Return the places of these records in an order of all, computed whole at 0.1 µs per record."""
        gaps = [
            start + np.flatnonzero(self.mask_at(order[start : start + SCANNED_PLACES], epoch))
            for start in range(0, len(order), SCANNED_PLACES)
        ]
        return np.concatenate([NO_RECORDS, *gaps])


NO_OMISSION = Omission(NO_RECORDS, closes_gaps=True)


class GaplessOrder:
    """An order without the numbers at these ascending places, its ``gaps``. Not thread-safe."""

    def __init__(self, order: PartOrder, gaps: Records) -> None:
        self._order, self._gaps = order, gaps
        self._places_before = gaps - np.arange(len(gaps))  # of this order, before each gap

    def __len__(self) -> int:
        return len(self._order) - len(self._gaps)

    def _place(self, place: int) -> int:
        """Return the place in the order with gaps."""
        return place + int(np.searchsorted(self._places_before, place, side="right"))

    def __getitem__(self, places: slice) -> Records:
        start, stop, _ = places.indices(len(self))
        if start >= stop:
            return NO_RECORDS
        first, end = self._place(start), self._place(stop - 1) + 1
        low, high = np.searchsorted(self._gaps, (first, end))
        return np.delete(self._order[first:end], self._gaps[low:high] - first)

    def numbers_at(self, places: Iterable[int]) -> Iterator[int]:
        return self._order.numbers_at(map(self._place, places))


PartOrder = DisplacedOrder | GaplessOrder
"""An order computed one window at a time."""
