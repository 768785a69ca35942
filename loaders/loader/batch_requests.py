"""What a loader asks its engine for: the items of each batch, once their files can be read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

from shardprep.formats.dataset.record_set import RecordSet
from shardprep.loaders.engine.engine import Engine
from shardprep.loaders.engine.protocol.batch import EngineBatch
from shardprep.loaders.engine.run import Plan
from shardprep.loaders.order.displaced_order import Records
from shardprep.loaders.order.epoch import EpochPlan

from .results import DeclaredResults
from .shard_task import ShardWork, blocks_read, files_read
from .shards_ahead.local_shards import BatchFeed, LocalShards
from .shards_ahead.read_ahead import ReadAhead, reading_ahead
from .shards_ahead.shard_files import ShardFiles
from .subset import Subset


def shards_of(dataset: RecordSet, work: ShardWork, plan: EpochPlan) -> LocalShards:
    """Return the shards that ``work`` reads: those of a dataset at a URL come through its cache.

    Raises CacheTooSmall if its limit is less than an epoch of the plan needs.
    """
    if "://" not in dataset.location:
        return LocalShards()
    from .shards_ahead.shard_feed import ShardFeed  # start-up time: asyncio

    return ShardFeed(dataset, ShardFiles(files_read(work)), plan)  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class BatchRequests:
    """The requests of a loader's batches. ``read_ahead`` bytes are read early, in the order of storage."""

    dataset: RecordSet
    work: ShardWork
    subset: Subset
    plan: EpochPlan
    results: DeclaredResults
    shards: LocalShards
    read_ahead: int

    @contextmanager
    def run(
        self, engine: Engine, places: Iterator[Records], steps: Iterator[int], epoch: int, start: int = 0
    ) -> Iterator[Iterator[EngineBatch]]:
        """The context of the batches of an epoch that continues at ``start``.

        ``places`` are those of each batch's records in the subset, and ``steps`` the number of each, from
        ``start``, after its places are drawn. Raises UsageError for a closed engine.
        """
        engine.refuse_closed()
        files, order, chosen = (
            blocks_read(self.dataset, self.work),
            None if self.subset.weights else self.plan.shards(epoch),  # by weight, they come in other turns
            self.subset.chosen,
        )
        with (
            self.shards.epoch(epoch, start) as feed,
            reading_ahead(self.dataset.path, files, order, budget=self.read_ahead, chosen=chosen) as ahead,
            closing(engine.run(self._plans(places, steps, epoch, ahead, feed))) as batches,  # type: ignore[type-var]
        ):
            yield batches

    def _plans(
        self,
        places: Iterator[Records],
        steps: Iterator[int],
        epoch: int,
        ahead: list[ReadAhead],
        feed: BatchFeed,
    ) -> Iterator[Plan]:
        """Yield the items of each batch, and report their records to the read-ahead."""
        for own, step in zip(places, steps, strict=False):
            items = self.subset.items_at(own, epoch)
            for each in ahead:
                each.expect(items["number"])
            request = self.results.request(items)
            yield from feed.plans(request, step)
