"""The shards of a remote dataset in the order in which a loader uses them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from functools import partial

import numpy as np

from shardprep.formats.dataset.remote.caching.cached_dataset import CachedDataset
from shardprep.formats.dataset.remote.caching.held import Held
from shardprep.formats.dataset.remote.caching.room import CacheTooSmall
from shardprep.formats.processes.collected_end import CollectedEnd
from shardprep.formats.system.owned import Owned
from shardprep.loaders.order.epoch import EpochPlan
from shardprep.loaders.order.shard_uses import ShardUses, Steps, shard_uses

from .epoch_feed import EpochFeed
from .held_shards import HoldThreads
from .local_shards import LocalShards, ShardLevels, StorageCounts
from .prefetcher import JOIN_TIMEOUT_S, MOST_AHEAD, Prefetcher
from .shard_files import ShardFiles

ROOM_AHEAD = 10  # one such part of the room is for shards that are used next


class ShardFeed(LocalShards, Owned):
    """The ``files`` of a cached dataset's shards, downloaded ahead of a loader's batches, within its limit.

    The order of the epochs to come is known: of the files in the cache, those go first that are used last.
    Raises CacheTooSmall if the limit is less than what an epoch of the ``plan`` needs at once.
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
            f"{has}, and the batches in this order need {least:,} at once; {advice}, or {self._instead()}",
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
    def epoch(self, number: int, start: int) -> Iterator[EpochFeed]:
        """The context of the batches of an epoch that continues at ``start``."""
        uses = shard_uses(self._plan, number, start=start) if start else self._uses(number)
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
    def held(self, shards: Iterable[int]) -> Iterator[Held]:
        """Download what is missing of these shards, and hold them.

        After :meth:`close` it opens the cache again, and closes it at the end.
        """
        try:
            with self._dataset.cache.hold(self._files.of(shards)) as held:
                yield held
        finally:
            if self._end.is_over:
                self._dataset.close()

    def _hold(self, shards: Iterable[int]) -> Future[Held]:
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
