"""Numbers displaced within a window: any range of their order, from a block of random numbers.

The order sorts i + window * u. The keys between two thresholds of that sum belong to numbers less than a
window below them: a block of the order takes a block and a window of random numbers, wherever it is, and
memory for these. All randomness is raw 64-bit Philox output, and all sorting is of unique integers: the order
is the same on every platform and with every numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Records = npt.NDArray[np.int64]
Stream = Callable[[int, int], Records]

MAX_RECORDS = (1 << 31) - 1  # a 64-bit sort key holds a record's position, its new place and a fraction
BLOCK = 1 << 16  # places: few enough to be sorted in the cache, in 1 ms
KEPT = 3  # blocks that adjacent places are in, where they are asked for in any order
DRAWN = 4  # words of each step of Philox's counter


class OrderBlock(NamedTuple):
    """The numbers at the places from ``start`` on."""

    start: int
    numbers: Records

    @property
    def stop(self) -> int:
        return self.start + len(self.numbers)


class DisplacedOrder:
    """0 .. ``count`` - 1 ordered by i + ``window`` * u, with u uniform in [0, 1) for each i.

    A ``window`` of 1 keeps the order, one of ``count`` orders by u alone. ``bits`` gives each i its u, from
    its state at this time on. The results are the numbers of a ``stream``, a function of (start, stop), or i.
    Not thread-safe.

    Blocks of ``block`` numbers, or of a window, are computed when they are asked for, and three are kept.
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
        self._begin = bits.state
        self._stream = stream
        self._size = max(block, window)
        self._computed = 0
        self._kept: dict[int, OrderBlock] = {}

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, places: slice) -> Records:
        """Return the numbers at adjacent places; read-only."""
        start, stop, _ = places.indices(self._count)
        parts = list(self._parts(start, stop))
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.int64), *parts])

    def _parts(self, start: int, stop: int) -> Iterator[Records]:
        while start < stop:
            block = self._block_of(start)
            yield block.numbers[start - block.start : stop - block.start]
            start = block.stop

    def each(self, places: Iterable[int]) -> Iterator[int]:
        """Yield the number at each of these places, which may be in any order.

        Where they are so far apart that more blocks are computed than there are, all become one: 8 bytes for
        each number.
        """
        start = stop = 0
        for place in places:
            if not start <= place < stop:
                if self._computed * self._size > 2 * (self._count + self._window):
                    self._size, self._computed, self._kept = self._count + self._window, 0, {}
                block = self._block_of(place)
                start, stop, item = block.start, block.stop, block.numbers.item
            yield item(place - start)

    def _block_of(self, place: int) -> OrderBlock:
        """The block of a place. A threshold T has T - window to T places before it, and a block a window."""
        number = place // self._size
        block = self._block(number)
        return block if place < block.stop else self._block(number + 1)

    def _block(self, number: int) -> OrderBlock:
        block = self._kept.pop(number, None) or self._compute(number)
        self._kept[number] = block
        if len(self._kept) > KEPT:
            del self._kept[next(iter(self._kept))]  # the one that was not asked for the longest
        return block

    def _compute(self, number: int) -> OrderBlock:
        self._computed += 1
        first, end = number * self._size, min((number + 1) * self._size, self._count + self._window)
        lowest, beyond = max(0, first - self._window + 1), min(self._count, end)
        before, order = self._sorted(lowest, beyond, first, end)
        numbers = order if self._stream is None else self._stream(lowest, beyond)[order - lowest]
        numbers.flags.writeable = False
        return OrderBlock(lowest + before, numbers)

    def _sorted(self, lowest: int, beyond: int, first: int, end: int) -> tuple[int, Records]:
        """Return how many of lowest .. beyond - 1 come before ``first``, and those from it to ``end``.

        A 64-bit key holds i + window * u as a fixed-point number in the high bits, and i in the low bits,
        which breaks ties and is the result.
        """
        if self._window == 1:
            return 0, np.arange(lowest, beyond, dtype=np.int64)
        index_bits = self._count.bit_length()
        positions = np.arange(lowest, beyond, dtype=np.uint64)
        keys = self._words(lowest, beyond)
        before = 0
        if self._window < self._count:
            fraction_bits = min(32, 63 - 2 * index_bits)
            keys >>= np.uint64(32)
            keys *= np.uint64(self._window)
            keys >>= np.uint64(32 - fraction_bits)
            keys += positions << np.uint64(fraction_bits)
            reached = keys >= np.uint64(first << fraction_bits)
            before = int(np.count_nonzero(~reached))
            inside = reached & (keys < np.uint64(end << fraction_bits))
            keys, positions = keys[inside], positions[inside]
        keys <<= np.uint64(index_bits)
        keys |= positions
        keys.sort()
        keys &= np.uint64((1 << index_bits) - 1)
        return before, keys.view(np.int64)

    def _words(self, lowest: int, beyond: int) -> npt.NDArray[np.uint64]:
        """Return the random words of these numbers."""
        self._bits.state = self._begin
        steps, rest = divmod(lowest, DRAWN)
        self._bits.advance(steps)
        return self._bits.random_raw(beyond - DRAWN * steps)[rest:]


def permutation(count: int, bits: np.random.Philox) -> Records:
    """Return 0 .. ``count`` - 1 in random order."""
    return DisplacedOrder(count, window=count, bits=bits)[:]
