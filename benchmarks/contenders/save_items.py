"""Items of (110 KB of bytes, int), the same for every library; imported by their processes."""

from __future__ import annotations

import random

ITEM_BYTES = 110_000
_DIFFERENT = 4_000_000


class Items:
    """``count`` items by number: slices of random bytes, and the number."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._bytes = b""

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[bytes, int]:
        if not 0 <= number < self.count:
            raise IndexError(number)
        if not self._bytes:
            self._bytes = random.Random(0).randbytes(_DIFFERENT + ITEM_BYTES)
        start = number * 7919 % _DIFFERENT
        return self._bytes[start : start + ITEM_BYTES], number

    def __reduce__(self) -> tuple[type[Items], tuple[int]]:
        return Items, (self.count,)
