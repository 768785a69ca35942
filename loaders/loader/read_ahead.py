"""Read-ahead: a thread that requests the data that the workers will need next, in disk order.

The workers read single records, which is very slow on a cold disk. Ahead of them, the thread requests ranges
of whole megabytes, in the epoch's order of shards. It keeps few requests pending, since the workers' own
reads would wait behind them. It requests the end of a shard first, because HDF5's columns are there.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt

from shardprep.formats.runtime.files import OPEN_FLAGS
from shardprep.formats.runtime.owned import Descriptor, Owned, starting_thread
from shardprep.formats.shards.in_place import Block
from shardprep.loaders.order.parts import Records

CHUNK_BYTES = 4 << 20
MAX_PENDING_CHUNKS = 4
SHARD_END_BYTES = 1 << 20


class ShardStream:
    """The shards of an epoch as one stream of bytes, in reading order.

    ``order`` has the numbers of the ``shards`` that are read, and ``ends`` their ends in the stream; other
    attributes are in storage order. A record's position in the stream is estimated as base + number * slope,
    as if all records of a shard had the same size. Only ``chosen`` records are read; None for all.
    """

    def __init__(
        self,
        folder: Path,
        shards: Sequence[Block],
        order: npt.NDArray[np.int64],
        chosen: Records | None = None,
    ) -> None:
        sizes = np.array([shard.size for shard in shards], np.int64)
        records = np.array([shard.records for shard in shards], np.int64)
        self.folder, self.order, self.chosen = folder, order, chosen
        self.blocks = [shards[number] for number in order]
        self.ends, self.record_ends = np.cumsum(sizes[order]), np.cumsum(records)
        starts = np.zeros(len(shards))
        starts[order] = self.ends - sizes[order]
        self.slopes = sizes / np.maximum(1, records)
        self.bases = starts - (self.record_ends - records) * self.slopes

    def span(self, numbers: Records) -> tuple[int, int]:
        """Estimate where in the stream the first of these records begins and the last ends."""
        shards = self.record_ends.searchsorted(numbers, side="right")
        begins = self.bases[shards] + numbers * self.slopes[shards]
        return int(begins.min()), math.ceil((begins + self.slopes[shards]).max())

    def pieces(self, start: int, stop: int) -> Iterator[tuple[Path, int, int]]:
        """Yield (path, offset, length) of the bytes from ``start`` to ``stop``, in chunks of one file."""
        stop = min(stop, int(self.ends[-1]))
        while start < stop:
            number = int(np.searchsorted(self.ends, start, side="right"))
            begin = int(self.ends[number - 1]) if number else 0
            length = min(stop, int(self.ends[number]), start + CHUNK_BYTES) - start
            block = self.blocks[number]
            yield self.folder / block.name, block.start + start - begin, length
            start += length

    def is_wanted(self, start: int, length: int) -> bool:
        """Whether a piece is worth reading whole: at least half of its records are chosen."""
        if self.chosen is None:
            return True
        shard = self.order[np.searchsorted(self.ends, start, side="right")]
        reach = np.array([start, start + length]) - self.bases[shard]
        first, last = np.rint(reach / self.slopes[shard])
        found = np.diff(np.searchsorted(self.chosen, [first, max(last, first + 1)]))
        return bool(2 * found >= last - first)


class ReadAhead(Owned):
    """A daemon thread that requests up to ``budget`` bytes of a stream ahead of the workers' reads.

    Pieces with fewer than half of their records chosen are left to the workers. Errors are ignored: the
    worker that reads the record raises them, with the record's key.
    """

    def __init__(self, stream: ShardStream, *, budget: int) -> None:
        self._stream = stream
        self._budget = budget
        self._spans: SimpleQueue[tuple[int, int] | None] = SimpleQueue()
        self._closed = False
        self._path: Path | None = None
        self._file = Descriptor(-1)  # one is open at a time
        self._pending: deque[int] = deque()
        self._thread = threading.Thread(target=self._follow, name="shardprep-read-ahead", daemon=True)
        with starting_thread():
            self._thread.start()

    def expect(self, numbers: Records) -> None:
        self._spans.put(self._stream.span(numbers))

    def close(self) -> None:
        """Stop the thread. Idempotent; may be called at interpreter exit."""
        self._closed = True
        self._spans.put(None)
        if not sys.is_finalizing():  # daemon threads no longer run then, and the join would time out
            self._thread.join(5)

    def _follow(self) -> None:
        position: int | None = None
        for first, reach in iter(self._spans.get, None):
            position = first if position is None else position
            for path, offset, length in self._stream.pieces(position, reach + self._budget):
                if self._closed:
                    break
                if self._stream.is_wanted(position, length):
                    with suppress(OSError):
                        self._request(path, offset, length)
                position += length
        self._file.close()

    def _request(self, path: Path, offset: int, length: int) -> None:
        """Request a chunk; if MAX_PENDING_CHUNKS are pending, first wait for the oldest of this file."""
        if path != self._path:
            self._path = None
            self._pending.clear()
            self._file.close()
            self._file = Descriptor(os.open(path, OPEN_FLAGS))
            self._path = path
            size = os.fstat(self._file.fileno()).st_size
            self._advise(max(0, size - SHARD_END_BYTES), SHARD_END_BYTES)
        self._pending.append(offset + length - 1)
        if len(self._pending) > MAX_PENDING_CHUNKS:
            os.pread(self._file.fileno(), 1, self._pending.popleft())
        self._advise(offset, length)

    def _advise(self, offset: int, length: int) -> None:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), offset, length, os.POSIX_FADV_WILLNEED)
        else:  # macOS
            os.pread(self._file.fileno(), length, offset)


@contextmanager
def reading_ahead(
    folder: Path,
    files: Sequence[Sequence[Block]],
    order: npt.NDArray[np.int64] | None,
    *,
    budget: int,
    chosen: Records | None = None,
) -> Iterator[list[ReadAhead]]:
    """Read the blocks of the images and of each column ahead in this ``order``, if there is one."""
    if order is None or not budget:
        yield []
        return
    sizes = [sum(block.size for block in blocks) for blocks in files]
    total = max(1, sum(sizes))
    ahead = []
    with ExitStack() as opened:
        for blocks, size in zip(files, sizes, strict=True):
            stream = ShardStream(folder, blocks, order, chosen)
            ahead.append(opened.enter_context(closing(ReadAhead(stream, budget=budget * size // total))))
        yield ahead
