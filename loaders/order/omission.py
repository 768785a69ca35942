"""Records that an epoch leaves out on purpose, while all others keep their order and random values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shardprep.formats.runtime.lazy import cached_property
from shardprep.loaders.order.parts import Records, WeightedParts

SCANNED = 1 << 18  # places of an order at a time
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class Omission:
    """Records that no epoch delivers, by their ``positions`` in stored order: int64, ascending and unique.

    If it ``closes`` the gaps, later records move up. With ``weights`` their places differ in each epoch.
    """

    positions: Records
    closes: bool
    weights: WeightedParts | None = None

    def __len__(self) -> int:
        return len(self.positions)

    def has(self, places: Records, epoch: int) -> npt.NDArray[np.bool_]:
        """Return which of the places of an epoch have such a record."""
        found = self.weights.positions(places, epoch) if self.weights else places
        inside = found < 8 * len(self._bits)
        bits = self._bits[np.where(inside, found >> 3, 0)] >> (found & 7).astype(np.uint8)
        return (bits & 1).astype(np.bool_) & inside

    @cached_property
    def _bits(self) -> npt.NDArray[np.uint8]:
        """One bit for each position up to the last: an eighth of a byte a record, and no search."""
        bits = np.zeros(int(self.positions[-1]) // 8 + 1, np.uint8)
        np.bitwise_or.at(bits, self.positions >> 3, np.left_shift(1, self.positions & 7).astype(np.uint8))
        return bits

    def kept(self, places: Records, epoch: int) -> Records:
        return places[~self.has(places, epoch)]

    def gaps(self, order: OrderedPart, epoch: int) -> Records:
        """Return where these records are in an order of all, which is computed whole: 0.1 µs a record."""
        found = [
            start + np.flatnonzero(self.has(order[start : start + SCANNED], epoch))
            for start in range(0, len(order), SCANNED)
        ]
        return np.concatenate([np.empty(0, np.int64), *found])


class OrderedPart(Protocol):
    """Numbers in an order that is computed one window at a time; see :class:`.DisplacedOrder`."""

    def __len__(self) -> int: ...
    def __getitem__(self, places: slice) -> Records: ...
    def each(self, places: Iterable[int]) -> Iterator[int]: ...


class ClosedOrder:
    """An order without the numbers at ``count`` places, which ``gaps`` finds, ascending. Not thread-safe."""

    def __init__(self, order: OrderedPart, count: int, gaps: Callable[[], Records]) -> None:
        self._order, self._count, self._find = order, count, gaps

    @cached_property
    def _gaps(self) -> Records:
        return self._find()

    @cached_property
    def _places_before(self) -> Records:
        """How many places of this order come before each gap."""
        return self._gaps - np.arange(len(self._gaps))

    def __len__(self) -> int:
        return len(self._order) - self._count

    def _place(self, place: int) -> int:
        """The place in the order with the gaps."""
        return place + int(np.searchsorted(self._places_before, place, side="right"))

    def __getitem__(self, places: slice) -> Records:
        start, stop, _ = places.indices(len(self))
        if start >= stop:
            return np.empty(0, np.int64)
        first, end = self._place(start), self._place(stop - 1) + 1
        low, high = np.searchsorted(self._gaps, (first, end))
        return np.delete(self._order[first:end], self._gaps[low:high] - first)

    def each(self, places: Iterable[int]) -> Iterator[int]:
        return self._order.each(map(self._place, places))
