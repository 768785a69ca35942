"""The shards of items: built in parallel by number, or one after the other in one pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any

import numpy as np

from shardprep.formats.containers.container import SUFFIXES, Extent
from shardprep.formats.conversion.building.build_shard import (
    ShardJob,
    build_shard,
    trusted_commit,
)
from shardprep.formats.conversion.building.built_shard import BuiltShard
from shardprep.formats.conversion.building.plan import Plan, PlannedShard
from shardprep.formats.conversion.building.progress_counters import COUNTERS_NAME, ProgressCounters
from shardprep.formats.conversion.building.shard_jobs import shard_jobs
from shardprep.formats.conversion.building.work_folder import WorkFolder
from shardprep.formats.conversion.running.job_runner import run_jobs
from shardprep.formats.processes.portable import packed
from shardprep.formats.progress import Progress

from .held_items import FetchedItems, FetchingJob, HeldItems, held_job
from .item_coder import EncodedItem, ItemCoder
from .numbered_items import NumberedItems

_ITEMS_PER_UPDATE = 64  # of the progress


@dataclass(frozen=True)
class NumberedShards:
    """Builds the shards of items with numbers: each is a job, and finished ones are kept.

    The items are fetched in the workers, or here if they cannot be sent to another process.
    """

    source: NumberedItems
    coder: ItemCoder
    planned: Plan
    workers: int | None
    progress: Progress

    def build(self, work_folder: WorkFolder) -> tuple[Plan, list[BuiltShard]]:
        """Return the plan and its shards, in order."""
        shards = self.planned.shards
        counters = ProgressCounters(work_folder.run / COUNTERS_NAME, shards)
        jobs = shard_jobs(self.planned, shards, HeldItems(), work_folder)
        with self.progress.task("save", records=len(self.planned.order), size=self._size()):
            built = run_jobs(self._filled(jobs), counters, workers=self.workers, progress=self.progress)
        return self.planned, built

    def _size(self) -> int:
        return sum(shard.extent.payload_bytes for shard in self.planned.shards)

    def _filled(self, jobs: Iterator[ShardJob]) -> Iterator[ShardJob]:
        elsewhere = None if self.workers == 0 else self.source.elsewhere()
        source = None if elsewhere is None else packed(elsewhere)
        if source is None:
            return self._held(list(jobs))
        reader = FetchedItems(source, self.coder)
        return (_fetching(replace(job, reader=reader)) for job in jobs)

    def _held(self, jobs: list[ShardJob]) -> Iterator[ShardJob]:
        """Yield the jobs, each with its items; in one pass over the items of unfinished shards."""
        wanted = {job.shard.number: trusted_commit(job) is None for job in jobs}
        numbers = [number for job in jobs if wanted[job.shard.number] for number in _numbers(job)]
        items = map(self.coder.encode, numbers, self.source.pick(iter(numbers)))
        for job in jobs:
            if wanted[job.shard.number]:
                own = _numbers(job)
                yield held_job(job, list(islice(items, len(own))), own)
            else:
                yield job


def _numbers(job: ShardJob) -> list[int]:
    numbers: list[int] = job.entries["offset"].tolist()
    return numbers


def _fetching(job: ShardJob) -> ShardJob:
    return FetchingJob(**{name: getattr(job, name) for name in job.__dataclass_fields__})


@dataclass(frozen=True)
class StreamedShards:
    """Builds the shards of an iterator, in this process and one after the other, in one pass.

    A shard is cut before the item that would make it larger than the shard size. Nothing is kept of an
    earlier run.
    """

    items: Iterator[Any]
    coder: ItemCoder
    planned: Plan
    total: int
    progress: Progress

    def build(self, work_folder: WorkFolder) -> tuple[Plan, list[BuiltShard]]:
        """Return the plan with the shards that were cut, and these."""
        planned, built = [], []
        with self.progress.task("save", records=self.total, size=0):
            done = 0
            for number, items in enumerate(self._groups()):
                job = self._job(work_folder, number, done, items)
                planned.append(job.shard)
                built.append(build_shard(job))
                done += len(items)
        order = np.arange(done, dtype=np.uint32)
        return replace(self.planned, shards=tuple(planned), order=order), built

    def _groups(self) -> Iterator[list[EncodedItem]]:
        limit, size, done = self.planned.options.shard_size, 0, 0
        group: list[EncodedItem] = []
        for number, item in zip(count(), self.items, strict=False):
            found = self.coder.encode(number, item)
            more = found.size
            if group and size + more > limit:
                yield group
                group, done, size = [], done + size, 0
            group.append(found)
            size += more
            if not number % _ITEMS_PER_UPDATE:
                self.progress.at(number, done + size)
        if group:
            yield group

    def _job(self, work_folder: WorkFolder, number: int, first: int, items: list[EncodedItem]) -> ShardJob:
        name = f"shard-{number:05d}{SUFFIXES[self.planned.options.container]}"
        shard = PlannedShard(name, number, first, first + len(items), Extent(len(items), 0, 1))
        ProgressCounters(work_folder.run / COUNTERS_NAME, [shard])
        plan = replace(self.planned, shards=(shard,))
        (job,) = shard_jobs(plan, [shard], HeldItems(), work_folder)
        return held_job(job, items, range(first, first + len(items)))


ShardBuilding = NumberedShards | StreamedShards
