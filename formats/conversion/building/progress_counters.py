"""A file of counters in the folder of a run, one per shard: the number of its images that a worker has done.

Each worker writes its own counter, so that a count outlives the worker, and no other bytes: the workers may
be on several hosts that share the file system. The parent reads the progress from the file, and the image
that a dead worker was at.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

import numpy as np
import numpy.typing as npt

from shardprep.formats.system.descriptor import Descriptor
from shardprep.formats.system.owned import Owned
from shardprep.formats.system.regular_file import naming

from .plan import PlannedShard
from .run_folder import is_of_this_host

COUNTERS_NAME = "counters"

# Between two counts of a worker on another host than the run's, each of which goes to the server at once.
FAR_INTERVAL_S = 1.0


class ProgressCounters(Owned):
    """The parent's view of all counters."""

    def __init__(self, path: Path, shards: Sequence[PlannedShard]) -> None:
        self.shards = len(shards)
        self._path = path
        slots = 1 + max((s.number for s in shards), default=0)
        path.unlink(missing_ok=True)
        with naming(path), path.open("xb") as file:
            file.write(bytes(8 * slots))  # written, not truncated to size: room on the disk is taken
        self._image_bytes = np.zeros(slots)
        for shard in shards:
            extent = shard.extent
            self._image_bytes[shard.number] = extent.payload_bytes / extent.records

    def done(self, number: int) -> int:
        """Return the number of images done in a shard."""
        return int(self._counts()[number])

    def total(self) -> tuple[int, int]:
        """Return the number of images, and about the number of bytes, done in all shards."""
        counts = self._counts()
        return int(counts.sum()), int(counts @ self._image_bytes)

    def _counts(self) -> npt.NDArray[np.int64]:
        """Read the file. It is opened each time: NFS then shows what other hosts have written."""
        return np.fromfile(self._path, dtype="<i8")


class ShardCounter(Owned):
    """A worker's counter in the file.

    On the host of the run each count is written, and seen there at once. Another host, which may share the
    file by NFS, writes one a second: synchronously, for otherwise it would keep counts for itself, and with a
    descriptor that cannot read, since NFS may write the whole of a page that was read.
    """

    def __init__(self, path: Path, number: int) -> None:
        self._is_far = not is_of_this_host(path.parent)
        flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        self._path = path
        self._file = Descriptor(os.open(path, flags | os.O_DSYNC if self._is_far else flags))
        self._at = 8 * number
        self._count = self._written = 0
        self._next = monotonic() + FAR_INTERVAL_S

    def set(self, count: int) -> None:
        """Publish the number of images done."""
        self._count = count
        if self._is_far and monotonic() < self._next:
            return
        self._write()

    def close(self) -> None:
        """Publish the last number, and close the file."""
        try:
            if self._count != self._written:
                self._write()
        finally:
            self._file.close()

    def _write(self) -> None:
        with naming(self._path):
            os.pwrite(self._file.fileno(), self._count.to_bytes(8, "little"), self._at)
        self._written = self._count
        self._next = monotonic() + FAR_INTERVAL_S
