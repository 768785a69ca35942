"""The shards of a loader before they are read: on this machine, or downloaded in the order of their use."""

from __future__ import annotations

import heapq
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import ShardprepError, UsageError
from shardprep.formats.runtime.owned import CollectedEnd, Owned, starting_thread
from shardprep.formats.shards.columns import PartFiles
from shardprep.formats.shards.files import FileEntry
from shardprep.formats.storage.cache import FileCache
from shardprep.formats.storage.cached_dataset import CachedDataset
from shardprep.formats.storage.downloads import CacheTooSmall, FileHold
from shardprep.loaders.engine.dispatcher import BatchRequest, NotReady, Plan
from shardprep.loaders.order.epoch import EpochPlan
from shardprep.loaders.order.shard_uses import ShardUses, Steps, shard_uses


class HeldShards:
    """``shards`` that several batches have; released when the last of them has given them back."""

    def __init__(self, shards: frozenset[int], held: FileHold) -> None:
        self.shards = shards
        self._held = held
        self._batches = 0
        self._released = False
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Take the shards for a batch; False if they were released before."""
        with self._lock:
            self._batches += not self._released
            return not self._released

    def give_back(self) -> None:
        """Give back what one batch had."""
        with self._lock:
            self._batches -= 1
            self._released = not self._batches
        if self._released:
            self._held.release()


class HoldThreads(Owned):
    """Threads that each wait until some files are held. Daemons: the cache's end ends them."""

    def __init__(self) -> None:
        self._running: list[threading.Thread] = []

    def begin(self, hold: Callable[[], FileHold]) -> Future[FileHold]:
        """Call ``hold``, which may wait for a download, in a thread."""
        found: Future[FileHold] = Future()

        def run() -> None:
            try:
                held = hold()
            except BaseException as error:  # raised in the thread that asks for the result
                found.set_exception(error)
            else:
                found.set_result(held)

        self._running = [thread for thread in self._running if thread.is_alive()]
        thread = threading.Thread(target=run, name="shardprep-hold", daemon=True)
        with starting_thread():
            thread.start()
        self._running.append(thread)
        return found

    def join(self, timeout_s: float) -> None:
        """Wait for their end, for at most so many seconds each."""
        for thread in self._running:
            if thread is not threading.current_thread():
                thread.join(timeout_s)


def abandon(pending: Future[FileHold]) -> None:
    """Release the shards that are held, or will be, without being used."""
    pending.add_done_callback(_release)


def _release(pending: Future[FileHold]) -> None:
    if pending.exception() is None:
        pending.result().release()


GRACE_S = 0.02  # enough to hold shards that are there


class EpochFeed(Owned):
    """The shards of an epoch's batches, held from before their items are drawn until the workers have ended.

    ``hold`` begins to hold shards, ``waited`` is given the seconds in which no batch was in the works, and
    whether none was before, and ``over`` each step that has ended. A forked
    copy of the process gets UsageError.
    """

    def __init__(
        self,
        uses: ShardUses,
        *,
        hold: Callable[[Iterable[int]], Future[FileHold]],
        waited: Callable[[float, bool], None],
        over: Callable[[int], None],
    ) -> None:
        self._uses = uses
        self._hold, self._waited, self._over = hold, waited, over
        self._last: HeldShards | None = None
        self._pending: Future[FileHold] | None = None
        self._in_flight: deque[HeldShards] = deque()

    def plans(self, request: BatchRequest, step: int) -> Iterator[Plan]:
        """Yield the request of a step's batch once its shards are held, and NotReady before that."""
        self._refuse_copied()
        shards = frozenset(self._uses.at(step).tolist())
        held = self._last
        while held is None or not shards <= held.shards or not held.take():
            pending = self._pending = self._hold(shards)
            wait([pending], GRACE_S)
            while not pending.done():
                yield NotReady(partial(self._wait, pending))
            held = self._last = HeldShards(shards, pending.result())
            self._pending = None
        self._in_flight.append(held)
        yield replace(request, filled=partial(self._filled, step))

    def _wait(self, pending: Future[FileHold]) -> None:
        self._refuse_copied()
        began = perf_counter()
        wait([pending])
        self._waited(perf_counter() - began, self._last is None)

    def _filled(self, step: int) -> None:
        """Release the shards of a batch; batches end in the order of their requests."""
        self._refuse_copied()
        with suppress(IndexError):  # closed in another thread
            self._in_flight.popleft().give_back()
            self._over(step)

    def _refuse_copied(self) -> None:
        """Raise UsageError in a forked copy of the process, which has no threads that hold shards."""
        if not self.made_here:
            raise UsageError("this Loader belongs to the process that forked this one; make another")

    def close(self) -> None:
        """Release the shards of batches that will not come."""
        if self._pending is not None:
            abandon(self._pending)
        with suppress(IndexError):
            while True:
                self._in_flight.popleft().give_back()


@dataclass(frozen=True)
class ShardLevels:
    """Position of an epoch: of its ``total`` shards ``begun`` are or were used, ``ahead`` more are there."""

    total: int = 0
    begun: int = 0
    ahead: int = 0

    @property
    def missing(self) -> int:
        """The shards of the epoch that are still to come."""
        return self.total - self.begun - self.ahead


@dataclass(frozen=True)
class StorageCounts:
    """Counts of a remote dataset's files since the loader was made; all 0 for a dataset on this machine.

    ``downloaded`` files with ``downloaded_bytes`` were downloaded by this process; ``received_bytes`` also
    count what is on its way, and what had to be asked for again. ``hits`` were in the cache already, or came
    by another process. ``waited`` are the seconds in which no batch could be begun because its shards were
    not there; ``waited_first`` are those before the first batches of epochs. ``replaced`` copies in the cache
    were thrown away, by any process, because the disk had not kept their bytes. ``shards`` says where the
    downloads are now.
    """

    downloaded: int = 0
    downloaded_bytes: int = 0
    received_bytes: int = 0
    hits: int = 0
    waited: float = 0.0
    waited_first: float = 0.0
    replaced: int = 0
    shards: ShardLevels = field(default_factory=ShardLevels)

    @property
    def limiting(self) -> float:
        """The seconds that batches waited while an epoch ran."""
        return self.waited - self.waited_first

    def since(self, before: StorageCounts) -> StorageCounts:
        """Return the counts since ``before``."""
        counts = {
            name: count - getattr(before, name) for name, count in vars(self).items() if name != "shards"
        }
        return replace(self, **counts)


class BatchFeed(Protocol):
    """The batches of one epoch; each begins when its shards are there."""

    def plans(self, request: BatchRequest, step: int) -> Iterator[Plan]:
        """Yield the request of a step's batch when its shards are there, and NotReady before that."""
        ...


class LocalShards:
    """Shards that are there: every batch begins at once."""

    def epoch(self, plan: EpochPlan, number: int, start: int) -> AbstractContextManager[BatchFeed]:
        """The context of the batches of an epoch that continues at ``start``, a place of the plan's order."""
        return nullcontext(self)

    def plans(self, request: BatchRequest, step: int) -> Iterator[Plan]:
        """Yield the request."""
        yield request

    def held(self, shards: Iterable[int]) -> AbstractContextManager[object]:
        """The context in which the files of these shards are there, for whatever reads besides batches."""
        return nullcontext()

    @property
    def counts(self) -> StorageCounts:
        """Files downloaded, found in the cache, and waited for."""
        return StorageCounts()

    def close(self) -> None:
        """End what downloads. Idempotent."""


AT_ONCE = 4
MOST_AHEAD = 8
JOIN_TIMEOUT_S = 5.0


class Prefetcher(Owned):
    """Threads that bring files to ``cache``, in the order of their use, as far as there is room.

    Others are evicted for the next ``ahead`` files only: for more, files would go that the next epoch needs,
    and more would be downloaded in all. A file that has no room, or cannot be downloaded, is tried again when
    more of the files were used; what needs it raises the error. The threads are daemons, and end with
    :meth:`close`, after that of the cache.
    """

    def __init__(self, cache: FileCache, *, ahead: int, at_once: int = AT_ONCE) -> None:
        self._cache = cache
        self._ahead = ahead
        self._begun = self._over = 0
        self._has_room = True
        self._files: Sequence[FileEntry] = ()
        self._next = 0
        self._put_back: list[int] = []
        self._there: set[int] = set()
        self._changed = threading.Condition()
        self._progress = 0
        self._is_closed = False
        self._threads: list[threading.Thread] = []
        try:
            self._begin(at_once)
        except BaseException:
            self.close()
            raise

    def _begin(self, at_once: int) -> None:
        for _ in range(at_once):
            thread = threading.Thread(target=self._run, name="shardprep-prefetch", daemon=True)
            with starting_thread():
                thread.start()
            self._threads.append(thread)

    def follow(self, files: Sequence[FileEntry]) -> None:
        """Download these files, in place of the planned ones."""
        with self._changed:
            self._files, self._next, self._put_back, self._there = files, 0, [], set()
            self._begun, self._has_room = 0, True
            self._progressed()

    def skip_to(self, begun: int, over: int) -> None:
        """Note that the first ``begun`` files are in use, or were, and that ``over`` uses have ended."""
        with self._changed:
            if (begun, over) == (self._begun, self._over):
                return
            self._begun, self._over = begun, over
            self._next = max(self._next, begun)
            self._put_back = [number for number in self._put_back if number >= begun]
            heapq.heapify(self._put_back)
            self._there = {number for number in self._there if number >= begun}
            self._progressed()

    @property
    def ahead(self) -> int:
        """The number of files that were brought, and are not in use yet."""
        return len(self._there)

    def _progressed(self) -> None:
        self._progress += 1
        self._changed.notify_all()

    def close(self) -> None:
        """End the threads. Idempotent."""
        if not self.made_here:  # else the lock can be held by a thread that was not copied
            return
        with self._changed:
            self._is_closed = True
            self._progressed()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(JOIN_TIMEOUT_S)

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            files, number, progress = taken
            is_near = number < self._begun + self._ahead
            try:
                is_there = self._cache.prefetch(files[number], evict=is_near)
            except (ShardprepError, OSError):
                is_there = False
            if is_there:
                self._note(files, number)
            else:
                self._wait(files, number, progress)

    def _take(self) -> tuple[Sequence[FileEntry], int, int] | None:
        """Return the number of the next file among all, when there is one; None at the end."""
        with self._changed:
            while not self._is_closed:
                number = min([*self._put_back[:1], self._next])
                if number < min(len(self._files), self._reach):
                    self._drop(number)
                    return self._files, number, self._progress
                self._changed.wait()
            return None

    @property
    def _reach(self) -> float:
        """The number of the first file that is not to be downloaded now."""
        return math.inf if self._has_room else self._begun + self._ahead

    def _drop(self, number: int) -> None:
        if number == self._next:
            self._next += 1
        else:
            heapq.heappop(self._put_back)

    def _note(self, files: Sequence[FileEntry], number: int) -> None:
        with self._changed:
            if files is self._files and number >= self._begun:
                self._there.add(number)

    def _wait(self, files: Sequence[FileEntry], number: int, progress: int) -> None:
        """Put a file back, and wait until others were used."""
        with self._changed:
            if files is self._files:
                heapq.heappush(self._put_back, number)
                self._has_room = False
            while self._progress == progress:
                self._changed.wait()


class ShardFiles:
    """The files that are read of each shard: of the images, and of each column that has its own.

    ``kinds`` are the files of each of these, by shard.
    """

    def __init__(self, kinds: Sequence[Sequence[FileEntry]]) -> None:
        self._kinds = kinds
        self.per_shard = len(kinds)
        self.sizes: npt.NDArray[np.int64] = sum(
            (np.array([file.size for file in files], np.int64) for files in kinds),
            start=np.zeros(1, np.int64),
        )

    @classmethod
    def of_parts(cls, parts: Sequence[PartFiles], *, with_image: bool) -> Self:
        """Return those of the images and of each column that has shards, as far as they are read.

        They are those of one dataset: a collection has no remote parts.
        """
        (part,) = parts
        of_images = [part.shards] if with_image else []
        return cls(of_images + [column.shards for column in part.columns if column.shards])

    @property
    def total(self) -> int:
        """The bytes of all of them."""
        return int(self.sizes.sum())

    def of(self, shards: Iterable[int]) -> list[FileEntry]:
        """Return the files of these shards, one shard after the other."""
        return [files[shard] for shard in shards for files in self._kinds]

    def least(self, uses: Sequence[ShardUses]) -> int:
        """Return the bytes that epochs like these need at once, with one shard more that is on its way."""
        if not self._kinds:
            return 0
        peak = max(each.peak(self.sizes) for each in uses)
        return min(self.total, peak + int(self.sizes.max(initial=0)))


ROOM_AHEAD = 10  # one such part of the room is for shards that are used next


class ShardFeed(LocalShards, Owned):
    """The ``files`` of a cached dataset's shards, downloaded ahead of a loader's batches, within its limit.

    The order of the epochs to come is known: of the files in the cache, those go first that are used last.
    Raises CacheTooSmall if the limit is less than an epoch of the ``plan`` needs at once.
    """

    def __init__(self, dataset: CachedDataset, files: ShardFiles, plan: EpochPlan) -> None:
        self._dataset, self._cache = dataset, dataset.cache
        self._files = files
        self._plan = plan
        self._known: dict[int, ShardUses] = {}
        self._threads = HoldThreads()
        self._waited_s = self._waited_first_s = 0.0
        self._begun = self._total = 0
        self._check_limit(_bytes_kept(dataset))
        self._prefetcher = Prefetcher(self._cache, ahead=self._ahead() * files.per_shard)
        self._end = CollectedEnd(self, partial(_end_downloads, dataset, self._prefetcher, self._threads))

    def _check_limit(self, kept: int) -> None:
        room = self._cache.room_bytes
        if self._files.total + kept <= room:
            return
        least = kept + self._files.least([self._uses(0), self._uses(1)])
        if least > room:
            raise self._too_small(room, least)

    def _too_small(self, room: int, least: int) -> CacheTooSmall:
        is_full = room < self._cache.limit_bytes
        has = f"the disk has room for {room:,} bytes" if is_full else f"cache_limit is {room:,} bytes"
        advice = "make room on it, choose another disk" if is_full else f"give at least cache_limit={least}"
        return CacheTooSmall(
            f"{has}, but the batches in this order need {least:,} at once; {advice}, or {self._instead()}",
            path=self._cache.folder.path,
            needed=least,
        )

    def _instead(self) -> str:
        """Say which order needs fewer shards at once."""
        shuffle, records = self._plan.shuffle, sum(self._plan.shard_counts)
        if shuffle is None:
            return "smaller shards"
        if shuffle.window_of(records) >= records:
            return "LocalShuffle with a window of less than the dataset"
        if shuffle.partitions < self._plan.world_size:
            return f"a smaller window, or LocalShuffle(..., partitions={self._plan.world_size})"
        return "a smaller window"

    def _ahead(self) -> int:
        """The number of shards to evict others for: a tenth of the room, at least one."""
        mean = self._files.total // max(1, len(self._files.sizes)) or 1
        return min(MOST_AHEAD, max(1, self._cache.limit_bytes // ROOM_AHEAD // mean))

    def _uses(self, epoch: int) -> ShardUses:
        if epoch not in self._known:
            self._known = {known: uses for known, uses in self._known.items() if abs(known - epoch) <= 1}
            self._known[epoch] = shard_uses(self._plan, epoch)
        return self._known[epoch]

    @contextmanager
    def epoch(self, plan: EpochPlan, number: int, start: int) -> Iterator[EpochFeed]:
        """The context of the batches of an epoch that continues at ``start``, a place of the plan's order."""
        is_whole = not start and not plan.passed
        uses = self._uses(number) if is_whole else shard_uses(plan, number, start=start)
        self._foresee(uses, self._uses(number + 1))
        self._begun, self._total = 0, len(uses.shards)
        over = partial(self._used, uses.firsts, uses.turns()[0])
        with closing(EpochFeed(uses, hold=self._hold, waited=self._waited, over=over)) as feed:
            yield feed

    def _foresee(self, *epochs: ShardUses) -> None:
        """Tell the cache the uses, and download each shard before its first."""
        turns = np.concatenate([each.turns()[1] for each in epochs])
        self._cache.foresee(self._files.of(turns.tolist()))
        begins = np.concatenate([each.shards for each in epochs])
        self._prefetcher.follow(self._files.of(begins.tolist()))

    @contextmanager
    def held(self, shards: Iterable[int]) -> Iterator[FileHold]:
        """Download the missing ones of these shards, and hold all.

        After :meth:`close` it opens the cache again, and closes it at the end.
        """
        try:
            with self._dataset.cache.hold(self._files.of(shards)) as held:
                yield held
        finally:
            if self._end.is_over:
                self._dataset.close()

    def _hold(self, shards: Iterable[int]) -> Future[FileHold]:
        return self._threads.begin(partial(self._cache.hold, self._files.of(shards)))

    def _waited(self, seconds: float, is_first: bool) -> None:
        self._waited_s += seconds
        self._waited_first_s += seconds if is_first else 0.0

    @property
    def counts(self) -> StorageCounts:
        found = self._cache.counts
        return StorageCounts(
            found.downloaded,
            found.downloaded_bytes,
            found.received_bytes,
            found.hits,
            self._waited_s,
            self._waited_first_s,
            found.replaced,
            self._levels(),
        )

    def _levels(self) -> ShardLevels:
        ahead = self._prefetcher.ahead // max(1, self._files.per_shard)
        return ShardLevels(self._total, self._begun, min(ahead, self._total - self._begun))

    def _used(self, firsts: Steps, turns: Steps, step: int) -> None:
        """Note that a step has ended, of an epoch with such first uses, and such uses."""
        begun, over = (int(np.searchsorted(steps, step, side="right")) for steps in (firsts, turns))
        self._begun = begun
        self._cache.used(over * self._files.per_shard)
        self._prefetcher.skip_to(begun * self._files.per_shard, over)

    def close(self) -> None:
        self._end()


def _end_downloads(dataset: CachedDataset, prefetcher: Prefetcher, threads: HoldThreads) -> None:
    """End the downloads, and then the threads that wait for them."""
    try:
        dataset.close()
    finally:
        prefetcher.close()
        threads.join(JOIN_TIMEOUT_S)


def _bytes_kept(dataset: CachedDataset) -> int:
    """The bytes of the tables, which stay in the cache while the dataset is open."""
    columns = dataset.manifest.columns
    tables = [column.table for column in columns.entries] if columns else []
    return sum(file.size for file in (*dataset.manifest.tables, *tables))
