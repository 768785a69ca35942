"""Records that epochs omit on purpose, while all others keep their order and random values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shardprep.formats.runtime.lazy import cached_property
from shardprep.loaders.order.parts import Records, WeightedParts

SCANNED = 1 << 18  # places computed at a time
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class Omission:
    """Records that no epoch delivers, as ``positions`` in stored order: int64, ascending and unique.

    If it ``closes`` the gaps, later records move up. With ``weights``, their places differ between epochs.
    """

    positions: Records
    closes: bool
    weights: WeightedParts | None = None

    def __len__(self) -> int:
        return len(self.positions)

    def has(self, places: Records, epoch: int) -> npt.NDArray[np.bool_]:
        """Return a mask of the places of an epoch that have an omitted record."""
        found = self.weights.positions(places, epoch) if self.weights else places
        inside = found < 8 * len(self._bits)
        bits = self._bits[np.where(inside, found >> 3, 0)] >> (found & 7).astype(np.uint8)
        return (bits & 1).astype(np.bool_) & inside

    @cached_property
    def _bits(self) -> npt.NDArray[np.uint8]:
        """One bit for each position up to the last, for look-ups without a search."""
        bits = np.zeros(int(self.positions[-1]) // 8 + 1, np.uint8)
        np.bitwise_or.at(bits, self.positions >> 3, np.left_shift(1, self.positions & 7).astype(np.uint8))
        return bits

    def kept(self, places: Records, epoch: int) -> Records:
        return places[~self.has(places, epoch)]

    def gaps(self, order: OrderedPart, epoch: int) -> Records:
        """Return the places of these records in an order of all, computed whole at 0.1 µs per record."""
        found = [
            start + np.flatnonzero(self.has(order[start : start + SCANNED], epoch))
            for start in range(0, len(order), SCANNED)
        ]
        return np.concatenate([np.empty(0, np.int64), *found])


class OrderedPart(Protocol):
    """An order computed one window at a time; see :class:`.DisplacedOrder`."""

    def __len__(self) -> int: ...
    def __getitem__(self, places: slice) -> Records: ...
    def each(self, places: Iterable[int]) -> Iterator[int]: ...


class ClosedOrder:
    """An order without the numbers at ``count`` ascending places, found by ``gaps``. Not thread-safe."""

    def __init__(self, order: OrderedPart, count: int, gaps: Callable[[], Records]) -> None:
        self._order, self._count, self._find = order, count, gaps

    @cached_property
    def _gaps(self) -> Records:
        return self._find()

    @cached_property
    def _places_before(self) -> Records:
        """The number of places of this order before each gap."""
        return self._gaps - np.arange(len(self._gaps))

    def __len__(self) -> int:
        return len(self._order) - self._count

    def _place(self, place: int) -> int:
        """Return the place in the order with gaps."""
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
