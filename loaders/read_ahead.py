"""Reading ahead: one thread that asks the kernel for what the workers will want next, in disk order.

The workers map or read single records; a page fault at a time would be ruinous on a cold disk. Ahead
of them, ranges of whole megabytes are asked for in the order in which the epoch reads its shards
through, by ``posix_fadvise``, bounded in bytes. Where that does not exist they are read and dropped.

Few requests are on their way at a time: what a worker has to read by itself would else wait behind the
whole budget. And the end of a shard comes first: HDF5's columns lie there, which opening it reads.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt

from ..formats.manifest import FileEntry
from .order import Records

CHUNK = 4 << 20
ON_THE_WAY = 4  # chunks
END = 1 << 20


@dataclass(frozen=True, eq=False)
class Stream:
    """The shards of an epoch as one stream of bytes, in the order in which they are read through.

    ``paths`` and ``ends`` (in bytes) are in that order, the rest in the order of storage: where a
    shard's record numbers end, and the line (``base + number * slope``) on which its records lie,
    as if they were all of one size.
    """

    paths: tuple[Path, ...]
    ends: npt.NDArray[np.int64]
    record_ends: npt.NDArray[np.int64]
    bases: npt.NDArray[np.float64]
    slopes: npt.NDArray[np.float64]

    @classmethod
    def of(cls, folder: Path, shards: Sequence[FileEntry], order: npt.NDArray[np.int64]) -> Stream:
        """The stream of these shards; ``order`` has their positions."""
        sizes = np.array([shard.size for shard in shards], np.int64)
        records = np.array([shard.records for shard in shards], np.int64)
        ends, record_ends = np.cumsum(sizes[order]), np.cumsum(records)
        starts = np.empty(len(shards))
        starts[order] = ends - sizes[order]
        slopes = sizes / np.maximum(1, records)
        bases = starts - (record_ends - records) * slopes
        return cls(tuple(folder / shards[n].name for n in order), ends, record_ends, bases, slopes)

    def span(self, numbers: Records) -> tuple[int, int]:
        """About where in the stream the first of these records begins and the last one ends."""
        shards = np.searchsorted(self.record_ends, numbers, side="right")
        begins = self.bases[shards] + numbers * self.slopes[shards]
        return int(begins.min()), math.ceil((begins + self.slopes[shards]).max())

    def pieces(self, start: int, stop: int) -> Iterator[tuple[Path, int, int]]:
        """(path, offset, length) of the bytes from ``start`` to ``stop``, in chunks of one file each."""
        stop = min(stop, int(self.ends[-1]))
        while start < stop:
            number = int(np.searchsorted(self.ends, start, side="right"))
            begin = int(self.ends[number - 1]) if number else 0
            length = min(stop, int(self.ends[number]), start + CHUNK) - start
            yield self.paths[number], start - begin, length
            start += length


class ReadAhead:
    """Reads up to ``budget`` bytes of the stream beyond what the workers may have reached, and each shard's end.

    Its thread is a daemon and ends with :meth:`close`. To fail to read ahead is no failure: whoever
    reads the record meets the reason, and says which record it was.
    """

    def __init__(self, stream: Stream, *, budget: int) -> None:
        self._stream = stream
        self._budget = budget
        self._spans: SimpleQueue[tuple[int, int] | None] = SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._follow, name="shardprep-read-ahead", daemon=True)
        self._thread.start()

    def expect(self, numbers: Records) -> None:
        """The workers will soon read these records."""
        self._spans.put(self._stream.span(numbers))

    def close(self) -> None:
        """End the thread. Safe to call twice, and when the interpreter ends."""
        self._closed = True
        self._spans.put(None)
        if not sys.is_finalizing():  # then no daemon runs any more, and would be waited for in vain
            self._thread.join(5)

    def _follow(self) -> None:
        position: int | None = None
        with _OneFile() as file:
            for first, reach in iter(self._spans.get, None):
                position = first if position is None else position
                for path, offset, length in self._stream.pieces(position, reach + self._budget):
                    if self._closed:
                        return
                    file.ask_for(path, offset, length)
                    position += length


class _OneFile:
    """The file that is being read ahead; they come one after the other, so that one is open at most."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._descriptor = -1
        self._asked: deque[int] = deque()

    def ask_for(self, path: Path, offset: int, length: int) -> None:
        """Ask for a chunk; wait first for the oldest of this file, where ON_THE_WAY are."""
        with suppress(OSError):
            self._open(path)
            self._asked.append(offset + length - 1)
            if len(self._asked) > ON_THE_WAY:
                os.pread(self._descriptor, 1, self._asked.popleft())
            self._want(offset, length)

    def _want(self, offset: int, length: int) -> None:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, offset, length, os.POSIX_FADV_WILLNEED)
        else:
            os.pread(self._descriptor, length, offset)

    def _open(self, path: Path) -> None:
        if path != self._path:
            self._close()
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._path = path
            self._want(max(0, os.fstat(self._descriptor).st_size - END), END)

    def _close(self) -> None:
        if self._path is not None:
            self._path = None
            self._asked.clear()
            os.close(self._descriptor)

    def __enter__(self) -> _OneFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self._close()
