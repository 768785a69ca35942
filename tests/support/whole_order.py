"""The deliveries expected of a loader, computed from the documented definitions without the package."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import accumulate, groupby
from typing import Protocol

import numpy as np
import numpy.typing as npt

Records = npt.NDArray[np.int64]

SHARD_ORDER, RECORD_ORDER, AUGMENTATION, PARTITION = 1, 2, 3, 5


class Windowed(Protocol):
    """A shuffle, of which the window and the partitions are taken."""

    @property
    def partitions(self) -> int: ...

    def window_of(self, records: int) -> int: ...


def philox(purpose: int, *, seed: int, epoch: int, item: int = 0) -> np.random.Philox:
    """Return the random bits of an item, at their start."""
    words = [np.array(each, np.uint64) for each in ([seed, epoch], [0, 0, item, purpose])]
    return np.random.Philox(key=words[0], counter=words[1])


def whole_order(shard_counts: Sequence[int], *, shuffle: Windowed | None, seed: int, epoch: int) -> Records:
    """Return every record number of the dataset once, in the order of this epoch."""
    records = sum(shard_counts)
    if shuffle is None:
        return np.arange(records, dtype=np.int64)
    partitions = shuffle.partitions
    window = math.ceil(shuffle.window_of(records) / partitions)
    order = np.empty(records, np.int64)
    for number, runs in enumerate(dealt_runs(shard_counts, partitions)):
        own = sum(map(len, runs))
        if window < own:
            bits = philox(SHARD_ORDER, seed=seed, epoch=epoch, item=number)
            runs = [runs[run] for run in displaced(len(runs), window=len(runs), bits=bits)]
        bits = philox(RECORD_ORDER, seed=seed, epoch=epoch, item=number)
        stream = np.array([record for run in runs for record in run], np.int64)
        order[number::partitions] = stream[displaced(own, window=min(window, own), bits=bits)]
    return order


def dealt_runs(shard_counts: Sequence[int], partitions: int) -> list[list[range]]:
    """Return the runs of adjacent records of each partition, in stored order."""
    ends = list(accumulate(shard_counts))
    shards = [range(end - count, end) for end, count in zip(ends, shard_counts, strict=True)]
    if partitions == 1:
        return [shards]
    row = displaced(len(shards), window=len(shards), bits=philox(PARTITION, seed=0, epoch=0))
    shard_of = [number for number, shard in enumerate(shards) for _ in shard]
    stream, parts = [record for number in row for record in shards[number]], []
    for number in range(partitions):
        size = len(range(number, sum(shard_counts), partitions))
        own, stream = sorted(stream[:size]), stream[size:]
        runs = [list(run) for _, run in groupby(own, key=shard_of.__getitem__)]
        parts.append([range(run[0], run[-1] + 1) for run in runs])
    return parts


def displaced(count: int, *, window: int, bits: np.random.Philox) -> Records:
    """Return 0 .. count - 1 ordered by i + window * u, with u uniform in [0, 1) for each i.

    One 64-bit key per record holds that sum as a fixed-point number in the high bits, and i in the low bits,
    which breaks ties and is the result. A window of ``count`` orders by u alone.
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
class Ranks:
    """How many processes share an epoch, in batches of which size, and whether only full ones count."""

    world: int
    batch: int
    drop_last: bool

    @property
    def step(self) -> int:
        """The places of a global step."""
        return self.world * self.batch

    def fitting(self, records: int, partitions: int) -> Ranks:
        """Return these ranks, or fewer and smaller batches, of which each has a share of an epoch."""
        allowed = [n for n in (1, 2, 3, 4) if (partitions % n == 0 or n % partitions == 0) and n <= records]
        world = max(n for n in allowed if n <= self.world)
        owned = max(1, partitions // world)
        batch = max(owned, self.batch // owned * owned)
        if self.drop_last and world * batch > records:
            batch = records // world // owned * owned
        return Ranks(world, batch or owned, self.drop_last and batch > 0)

    def stop(self, records: int, start: int = 0) -> int:
        """The place at which an epoch ends that goes on at ``start``."""
        return records - (records - start) % self.step if self.drop_last else records

    def steps(self, records: int, partitions: int, start: int = 0) -> list[list[list[int]]]:
        """The places that each rank has at each global step; none for a rank without a batch."""
        sharing, owned = max(1, self.world // partitions), max(1, partitions // self.world)
        rest = range(start, records)
        parts = [[place for place in rest if place % partitions == number] for number in range(partitions)]
        cut = [_shared_out(part, self.batch // owned, sharing) for part in parts]
        total = ((records - start) // self.step) if self.drop_last else max(map(len, cut))
        return [
            [
                [
                    place
                    for part in cut[rank * partitions // self.world :][:owned]
                    if step < len(part)
                    for place in part[step][rank % sharing]
                ]
                for rank in range(self.world)
            ]
            for step in range(total)
        ]


def _shared_out(places: list[int], batch: int, ranks: int) -> list[list[list[int]]]:
    """The places of each step and rank: full batches, and then what is left, as evenly as possible."""
    full, steps = len(places) // (batch * ranks), []
    for step in range(full):
        steps.append([places[(step * ranks + rank) * batch :][:batch] for rank in range(ranks)])
    rest = places[full * batch * ranks :]
    if rest:
        sizes = [len(rest[rank::ranks]) for rank in range(ranks)]
        ends = list(accumulate(sizes))
        steps.append([rest[end - size : end] for end, size in zip(ends, sizes, strict=True)])
    return steps


@dataclass(frozen=True)
class Shares:
    """Parts of a dataset by weight: how many records each has, and how many places of an epoch."""

    records: tuple[int, ...]
    places: tuple[int, ...]

    @classmethod
    def of(cls, weights: Iterable[float], records: Sequence[int]) -> Shares:
        """Divide the places by largest remainder."""
        exact = [Fraction(weight) for weight in weights]
        quotas = [sum(records) * weight / sum(exact) for weight in exact]
        places = [math.floor(quota) for quota in quotas]
        by_rest = sorted(range(len(quotas)), key=lambda part: places[part] - quotas[part])
        for part in by_rest[: sum(records) - sum(places)]:
            places[part] += 1
        return cls(tuple(records), tuple(places))

    def positions(self, epoch: int) -> list[int]:
        """Return which of all records, in stored order, is at each place."""
        firsts = [0, *accumulate(self.records)]
        return [
            firsts[part] + (epoch * places + turn) % self.records[part]
            for part, places in enumerate(self.places)
            for turn in range(places)
        ]

    def blocks(self, shard_counts: Sequence[Sequence[int]]) -> list[int]:
        """Return the places that are read together: a part's shards, again and again, until it is full."""
        blocks = []
        for counts, places in zip(shard_counts, self.places, strict=True):
            kept, turn = [count for count in counts if count], 0
            while places:
                blocks.append(min(kept[turn % len(kept)], places))
                places, turn = places - blocks[-1], turn + 1
        return blocks


@cache
def _mixed(record: int, start: int) -> int:
    """SplitMix64's output for a record number."""
    z = (record * 0x9E3779B97F4A7C15 + start) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def tally(records: Iterable[int]) -> dict[str, object]:
    """Return the count and the digest of record numbers, as a receipt's JSON has them."""
    numbers = list(records)
    starts = (0x243F6A8885A308D3, 0x13198A2E03707344)
    lanes = [sum(_mixed(number, start) for number in numbers) % 2**64 for start in starts]
    return {"count": len(numbers), "digest": "".join(f"{lane:016x}" for lane in lanes)}
