"""Makes shards available before a loader needs them: reads them ahead, or downloads them in order of use.

The workers read single records, which is very slow on a cold disk. Ahead of them, a thread requests ranges of
whole megabytes, in the epoch's order of shards. It keeps few requests pending, since the workers' own reads
would wait behind them. It requests the end of a shard first, because HDF5's columns are there.
"""

from __future__ import annotations

import heapq
import math
import os
import resource
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import ShardprepError
from shardprep.formats.runtime.files import OPEN_FLAGS
from shardprep.formats.runtime.owners import Descriptor, Finalizer, Owner
from shardprep.formats.shards.columns import MAX_OPEN, PartFiles
from shardprep.formats.shards.dataset import Block
from shardprep.formats.shards.manifest import tables_of
from shardprep.formats.shards.read import FileEntry
from shardprep.formats.storage.cache import CacheCounts, CachedDataset, CacheTooSmall, FileCache, FileHold
from shardprep.loaders.engine.dispatcher import BatchRequest, Plan
from shardprep.loaders.engine.engine import Counts
from shardprep.loaders.order.epoch import EpochPlan, ShardUses, peak_use, shard_uses
from shardprep.loaders.order.parts import Records

CHUNK_BYTES = 4 << 20
MAX_PENDING_CHUNKS = 4
SHARD_END_BYTES = 1 << 20


class ReadAhead(Owner):
    """A daemon thread that requests up to ``budget`` bytes of shards ahead of the workers' reads.

    The ``shards`` are read as one stream of bytes, in this ``order``. A record's position in it is estimated
    as base + number * slope, as if all records of a shard had the same size. Pieces with fewer than half of
    their records ``chosen`` (None for all) are left to the workers. Errors are ignored: the worker that reads
    the record raises them, with the record's key.
    """

    def __init__(
        self,
        folder: Path,
        shards: Sequence[Block],
        order: npt.NDArray[np.int64],
        chosen: Records | None,
        *,
        budget: int,
    ) -> None:
        sizes = np.array([shard.size for shard in shards], np.int64)
        records = np.array([shard.records for shard in shards], np.int64)
        self._folder, self._order, self._chosen, self._budget = folder, order, chosen, budget
        self._blocks = [shards[number] for number in order]
        self._ends, self._record_ends = np.cumsum(sizes[order]), np.cumsum(records)
        starts = np.zeros(len(shards))
        starts[order] = self._ends - sizes[order]
        self._slopes = sizes / np.maximum(1, records)
        self._bases = starts - (self._record_ends - records) * self._slopes
        self._spans: SimpleQueue[tuple[int, int] | None] = SimpleQueue()
        self._closed = False
        self._path: Path | None = None
        self._file = Descriptor(-1)  # one is open at a time
        self._pending: deque[int] = deque()
        # started later: an interruption in this method would leave it behind
        self._thread = threading.Thread(target=self._run, name="shardprep-read-ahead", daemon=True)

    def expect(self, numbers: Records) -> None:
        shards = self._record_ends.searchsorted(numbers, side="right")
        begins = self._bases[shards] + numbers * self._slopes[shards]
        self._spans.put((int(begins.min()), math.ceil((begins + self._slopes[shards]).max())))
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        """Stop the thread. Idempotent; may be called at interpreter exit."""
        self._closed = True
        self._spans.put(None)
        if self._thread.is_alive() and not sys.is_finalizing():  # daemon threads no longer run then
            self._thread.join(5)

    def _run(self) -> None:
        position = 0
        for first, reach in iter(self._spans.get, None):
            position = max(position, first)
            stop = min(reach + self._budget, int(self._ends[-1]))
            while position < stop and not self._closed:
                number = int(np.searchsorted(self._ends, position, side="right"))
                begin = int(self._ends[number - 1]) if number else 0
                length = min(stop, int(self._ends[number]), position + CHUNK_BYTES) - position
                if self._is_wanted(self._order[number], position, length):
                    block = self._blocks[number]
                    with suppress(OSError):
                        self._request(self._folder / block.name, block.start + position - begin, length)
                position += length
        self._file.close()

    def _is_wanted(self, shard: int, start: int, length: int) -> bool:
        """Whether a piece is worth reading whole: at least half of its records are chosen."""
        if self._chosen is None:
            return True
        first, last = np.rint((np.array([start, start + length]) - self._bases[shard]) / self._slopes[shard])
        chosen = np.diff(np.searchsorted(self._chosen, [first, max(last, first + 1)]))
        return bool(2 * chosen >= last - first)

    def _request(self, path: Path, offset: int, length: int) -> None:
        """Request a chunk; if MAX_PENDING_CHUNKS are pending, first wait for the oldest of this file."""
        if path != self._path:
            file = Descriptor(os.open(path, OPEN_FLAGS))
            self._file.close()
            self._path, self._file = path, file
            self._pending.clear()
            size = os.fstat(self._file.fileno()).st_size
            self._advise(max(0, size - SHARD_END_BYTES), SHARD_END_BYTES)
        self._pending.append(offset + length - 1)
        if len(self._pending) > MAX_PENDING_CHUNKS:
            os.pread(self._file.fileno(), 1, self._pending.popleft())
        self._advise(offset, length)

    def _advise(self, offset: int, length: int) -> None:
        os.posix_fadvise(self._file.fileno(), offset, length, os.POSIX_FADV_WILLNEED)


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
            reader = ReadAhead(folder, blocks, order, chosen, budget=budget * size // total)
            ahead.append(opened.enter_context(closing(reader)))
        yield ahead


THREADS = 4
MAX_AHEAD = 8
JOIN_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class ShardLevels:
    """Of an epoch's ``total`` shards, ``begun`` are or were in use, and ``ahead`` more are downloaded."""

    total: int = 0
    begun: int = 0
    ahead: int = 0

    @property
    def missing(self) -> int:
        """The number of the epoch's shards still to be downloaded."""
        return self.total - self.begun - self.ahead


@dataclass(frozen=True)
class StorageCounts(CacheCounts, Counts):
    """Counts of a remote dataset's files since the loader was made; all 0 for a local dataset.

    Batches waited for missing shards for ``waited`` seconds; ``waited_first`` of these were before the first
    batches of epochs.
    """

    CURRENT: ClassVar = frozenset({"shards"})

    waited: float = 0.0
    waited_first: float = 0.0
    shards: ShardLevels = field(default_factory=ShardLevels)

    @property
    def limiting(self) -> float:
        """The seconds that batches waited within epochs."""
        return self.waited - self.waited_first


class Prefetcher(Owner):
    """Daemon threads that download files to ``cache`` in order of use, as long as there is room.

    Only the next ``ahead`` files may evict others; more would evict files that the next epoch needs. A file
    that has no room or cannot be downloaded is tried again after more files were used; the error is raised
    when the file is needed.
    """

    def __init__(self, cache: FileCache, *, ahead: int) -> None:
        self._cache = cache
        self._ahead = ahead
        self._changed = threading.Condition()
        self._is_closed = False
        self.replace_files(())
        name = "shardprep-prefetch"
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for _ in range(THREADS)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def replace_files(self, files: Sequence[FileEntry]) -> None:
        """Download these files instead of the planned ones."""
        with self._changed:
            self._files, self._pending = files, [*range(len(files))]
            self._postponed, self._downloaded = list[int](), set[int]()
            self._begun, self._over, self._has_room = 0, 0, True
            self._changed.notify_all()

    def advance(self, begun: int, over: int) -> None:
        """Record that the first ``begun`` files are or were in use, and that ``over`` uses have ended."""
        with self._changed:
            if (begun, over) == (self._begun, self._over):
                return
            self._begun, self._over = begun, over
            while self._postponed:
                heapq.heappush(self._pending, self._postponed.pop())
            while self._pending and self._pending[0] < begun:
                heapq.heappop(self._pending)
            self._downloaded = {number for number in self._downloaded if number >= begun}
            self._changed.notify_all()

    @property
    def ahead_count(self) -> int:
        """The number of downloaded files that are not in use yet."""
        return len(self._downloaded)

    def _run(self) -> None:
        while (task := self._take()) is not None:
            files, number, is_near = task
            is_downloaded, had_room = False, True
            with suppress(ShardprepError, OSError):
                is_downloaded = had_room = self._cache.prefetch(files[number], evict=is_near)
            with self._changed:
                if files is not self._files:
                    continue
                self._has_room &= had_room
                if not is_downloaded:
                    self._postponed.append(number)
                elif number >= self._begun:
                    self._downloaded.add(number)

    def _take(self) -> tuple[Sequence[FileEntry], int, bool] | None:
        """Wait for a file; return all files, its number, and whether it is near; None at the end."""
        with self._changed:
            while not self._is_closed:
                near = self._begun + self._ahead
                if self._pending and (self._has_room or self._pending[0] < near):
                    number = heapq.heappop(self._pending)
                    return self._files, number, number < near
                self._changed.wait()
            return None

    def close(self) -> None:
        """Tell the threads to stop. Idempotent."""
        if self.was_made_here:  # in a forked process, a thread that does not exist may hold the lock
            with self._changed:
                self._is_closed = True
                self._changed.notify_all()

    def join(self) -> None:
        """Wait for the threads to stop, for at most JOIN_TIMEOUT_S each."""
        for thread in self._threads:
            if thread.is_alive():
                thread.join(JOIN_TIMEOUT_S)


class EpochFeed(Owner):
    """The shards of an epoch's batches, held from before their items are drawn until the batches are filled.

    A batch that needs no further shards shares the previous one's hold.
    """

    def __init__(self, shards: ShardFeed, uses: ShardUses) -> None:
        self._shards, self._uses = shards, uses
        self._boundaries = uses.boundaries()[0]
        self._has_begun = False
        self._in_flight: deque[tuple[frozenset[int], FileHold]] = deque()
        self._lock = threading.RLock()

    def plans(self, request: BatchRequest, step: int) -> Iterator[Plan]:
        """Yield the request of a step's batch once its shards are held; until then, functions that wait."""
        self.refuse_forked("Loader")
        shards = frozenset(self._uses.at(step).tolist())
        with self._lock:
            last = self._in_flight[-1] if self._in_flight and shards <= self._in_flight[-1][0] else None
            if last:
                self._in_flight.append(last)
        if not last:
            arrived: list[FileHold] = []
            while (hold := arrived.pop() if arrived else self._shards.hold_cached(shards)) is None:
                yield lambda: arrived.append(self._shards.hold(shards, is_first=not self._has_begun))
            with self._lock:
                self._in_flight.append((shards, hold))
            self._has_begun = True
        yield replace(request, on_filled=partial(self._release_step, step))

    def _release_step(self, step: int) -> None:
        """Release the shards of a batch; batches are filled in the order of their requests."""
        if self._release_first():  # otherwise another thread has closed the feed
            steps = self._uses.firsts, self._boundaries
            begun, over = (int(np.searchsorted(each, step, side="right")) for each in steps)
            self._shards.record_use(begun, over)

    def _release_first(self) -> bool:
        """Release the oldest batch's shards, unless the next one shares them; False if there is none."""
        with self._lock:
            if not self._in_flight:
                return False
            _, hold = self._in_flight.popleft()
            if not self._in_flight or self._in_flight[0][1] is not hold:
                hold.release()
            return True

    def close(self) -> None:
        """Release the shards of all pending batches."""
        while self._release_first():
            pass


class ShardFiles:
    """The files that are read of each shard of a dataset: images, and each column stored separately."""

    def __init__(self, parts: Sequence[PartFiles], *, with_image: bool) -> None:
        (part,) = parts
        of_images = [part.shards] if with_image else []
        self._kinds = of_images + [column.shards for column in part.columns if column.shards]
        self.per_shard = len(self._kinds)
        sizes = [[file.size for file in files] for files in self._kinds] or [[0]]
        self.sizes = np.array(sizes, np.int64).sum(axis=0)
        self.total = int(self.sizes.sum())

    def of(self, shards: Iterable[int]) -> list[FileEntry]:
        return [files[shard] for shard in shards for files in self._kinds]


ROOM_AHEAD = 10  # a tenth of the room, at least one shard, is for shards downloaded ahead


class ShardFeed(Owner):
    """The ``files`` of a cached dataset's shards, downloaded ahead of a loader's batches, within its limit.

    Raises CacheTooSmall if one of the first epochs of the ``plan`` needs more than the limit at once.
    """

    def __init__(self, dataset: CachedDataset, files: ShardFiles, plan: EpochPlan) -> None:
        self._source, self._cache = dataset.source, dataset.cache
        self._files = files
        self._uses = lru_cache(maxsize=3)(partial(shard_uses, plan))
        self._waited_s = self._waited_first_s = 0.0
        self._begun = self._total = 0
        self._check_limit(plan, sum(table.size for table in tables_of(dataset.manifest)))
        mean = files.total // max(1, len(files.sizes)) or 1
        ahead = min(MAX_AHEAD, max(1, self._cache.limit_bytes // ROOM_AHEAD // mean))
        self._prefetcher = Prefetcher(self._cache, ahead=ahead * files.per_shard)
        self._feeds: weakref.WeakSet[EpochFeed] = weakref.WeakSet()
        self._end = Finalizer(self, partial(end_downloads, dataset, self._prefetcher, self._feeds))
        self._prefetcher.start()  # which an interruption would leave behind without the line above

    def _check_limit(self, plan: EpochPlan, kept: int) -> None:
        room = self._cache.room_bytes
        if self._files.total + kept <= room:
            return
        sizes = self._files.sizes
        peak = peak_use(plan, sizes) if self._files.per_shard else 0
        least = kept + min(self._files.total, peak + int(sizes.max(initial=0)))  # one more is downloading
        if least > room:
            is_full = room < self._cache.limit_bytes
            has = f"the disk has room for {room:,} bytes" if is_full else f"cache_limit is {room:,} bytes"
            advice = (
                "make room on it, choose another disk" if is_full else f"give at least cache_limit={least}"
            )
            raise CacheTooSmall(
                f"{has}, but the batches in this order need {least:,} at once; {advice}, or use smaller shards, or a "
                "LocalShuffle with a smaller window and, for several ranks, with as many partitions",
                path=self._cache.folder.path,
                needed=least,
            )

    @contextmanager
    def epoch(self, plan: EpochPlan, number: int, start: int) -> Iterator[EpochFeed]:
        """Open the feed of an epoch's batches, from ``start`` on, a place of the plan's order."""
        is_whole = not start and not plan.passed
        uses = self._uses(number) if is_whole else shard_uses(plan, number, start=start)
        epochs = uses, self._uses(number + 1)
        by_boundary = np.concatenate([each.boundaries()[1] for each in epochs])
        at_once = uses.peak(np.full(len(plan.shard_counts), self._files.per_shard))
        _allow_open_files(2 * at_once)  # a batch holds its shards before the previous one releases its own
        self._cache.announce(self._files.of(by_boundary.tolist()))
        begins = np.concatenate([each.shards for each in epochs])
        self._prefetcher.replace_files(self._files.of(begins.tolist()))
        self._begun, self._total = 0, len(uses.shards)
        with closing(EpochFeed(self, uses)) as feed:
            self._feeds.add(feed)
            yield feed

    @contextmanager
    def hold_downloaded(self, shards: Iterable[int]) -> Iterator[FileHold]:
        """Download missing shards, and hold all of these in a context; works after :meth:`close`, too."""
        with ExitStack() as opened:
            cache = self._cache
            if self._end.has_run:
                cache = opened.enter_context(self._source.open_cache())
            yield opened.enter_context(cache.hold(self._files.of(shards)))

    def hold_cached(self, shards: Iterable[int]) -> FileHold | None:
        """Hold shards that are in the cache; None if one is missing."""
        return self._cache.hold_cached(self._files.of(shards))

    def hold(self, shards: Iterable[int], *, is_first: bool) -> FileHold:
        """Wait for the download of shards, and hold them; ``is_first`` for the first batch of an epoch."""
        began = perf_counter()
        try:
            return self._cache.hold(self._files.of(shards))
        finally:
            waited = perf_counter() - began
            self._waited_s += waited
            self._waited_first_s += waited if is_first else 0.0

    def record_use(self, begun: int, over: int) -> None:
        """Record that the first ``begun`` shards are or were in use, and ``over`` boundaries are past."""
        self._begun = begun
        self._cache.record_position(over * self._files.per_shard)
        self._prefetcher.advance(begun * self._files.per_shard, over)

    @property
    def counts(self) -> StorageCounts:
        ahead = self._prefetcher.ahead_count // max(1, self._files.per_shard)
        return StorageCounts(
            **vars(self._cache.counts),
            waited=self._waited_s,
            waited_first=self._waited_first_s,
            shards=ShardLevels(self._total, self._begun, min(ahead, self._total - self._begun)),
        )

    def close(self) -> None:
        """Stop all downloads. Idempotent."""
        self._end()


def _allow_open_files(count: int) -> None:
    """Raise this process's limit of open files for ``count`` more, as far as its hard limit permits."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + 4 * MAX_OPEN  # which is what it had before
    if needed > limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed if most < 0 else min(needed, most), most))


def end_downloads(
    cache: CachedDataset | FileCache, prefetcher: Prefetcher, feeds: Iterable[EpochFeed] = ()
) -> None:
    """Stop the downloads and then the threads that wait for them, and release what open epochs hold."""
    prefetcher.close()  # first: a thread whose download is cancelled would start the next one
    try:
        cache.close()
    finally:
        for feed in list(feeds):
            feed.close()
        prefetcher.join()
