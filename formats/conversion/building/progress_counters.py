"""A file of counters, one per shard: the number of its images that a worker has done.

Workers write to it through a map, so that a count outlives the worker. The parent reads the progress
from it, and the image that a dead worker was at.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from shardprep.formats.system.owned import Owned
from shardprep.formats.system.regular_file import naming

from .plan import PlannedShard

COUNTERS_NAME = "counters"


class ProgressCounters(Owned):
    """The parent's view of all counters."""

    def __init__(self, path: Path, shards: Sequence[PlannedShard]) -> None:
        self.shards = len(shards)
        slots = 1 + max((s.number for s in shards), default=0)
        path.unlink(missing_ok=True)
        with naming(path), path.open("xb") as file:
            file.write(bytes(8 * slots))  # written, not truncated to size: a hole could give SIGBUS
        self._counts = np.memmap(path, dtype=np.int64, mode="r", shape=(slots,))
        self._image_bytes = np.zeros(slots)
        for shard in shards:
            extent = shard.extent
            self._image_bytes[shard.number] = extent.payload_bytes / extent.records

    def done(self, number: int) -> int:
        """Return the number of images done in a shard."""
        return int(self._counts[number])

    def total(self) -> tuple[int, int]:
        """Return the number of images, and about the number of bytes, done in all shards."""
        return int(self._counts.sum()), int(self._counts @ self._image_bytes)


class ShardCounter(Owned):
    """A worker's counter in the file."""

    def __init__(self, path: Path, number: int) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._at = 8 * number

    def set(self, count: int) -> None:
        """Publish the number of images done."""
        self._map[self._at : self._at + 8] = count.to_bytes(8, "little")

    def close(self) -> None:
        """Unmap the file."""
        self._map.close()
