"""A page of counters, one per shard: how many of its images a worker has done.

Workers write to it through a map, so that a count outlives the worker that wrote it: the parent
reads progress from it, and which image a dead worker was at.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .plan import PlannedShard

BOARD_NAME = "board"


class Board:
    """The parent's view of all counters."""

    def __init__(self, path: Path, shards: Sequence[PlannedShard]) -> None:
        slots = 1 + max((s.number for s in shards), default=0)
        path.unlink(missing_ok=True)
        with path.open("xb") as file:
            file.write(bytes(8 * slots))  # written, not cut to size: a hole could become SIGBUS
        self._counts = np.memmap(path, dtype=np.int64, mode="r", shape=(slots,))
        self._image_bytes = np.zeros(slots)
        for shard in shards:
            extent = shard.extent
            self._image_bytes[shard.number] = extent.payload_bytes / extent.records

    def done(self, number: int) -> int:
        """How many images of a shard are done."""
        return int(self._counts[number])

    def total(self) -> tuple[int, int]:
        """How many images, and about how many bytes, are done in all shards."""
        return int(self._counts.sum()), int(self._counts @ self._image_bytes)


class Counter:
    """A worker's place on the board."""

    def __init__(self, path: Path, number: int) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._at = 8 * number

    def set(self, count: int) -> None:
        """Publish the number of images done."""
        self._map[self._at : self._at + 8] = count.to_bytes(8, "little")

    def close(self) -> None:
        """Unmap the board."""
        self._map.close()
