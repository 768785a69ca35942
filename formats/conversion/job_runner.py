"""The runner of shard jobs in parallel processes or on any executor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import replace
from itertools import chain, islice

from shardprep.formats.conversion.building.build_shard import BuiltShard, ShardJob, build_shard, decode_alone
from shardprep.formats.conversion.building.progress_counters import ProgressCounters
from shardprep.formats.errors import ShardprepError, WorkerDied
from shardprep.formats.processes.child_process import ChildDied, ChildLost, isolated
from shardprep.formats.processes.worker_pool import WorkerPool, usable_cpus
from shardprep.formats.progress import Progress, tell_shards

POLL_INTERVAL_S = 0.2
DECODE_TIMEOUT_S = 60.0  # to decode one image


def run_jobs(
    jobs: Iterable[ShardJob],
    counters: ProgressCounters,
    *,
    workers: int | None = None,
    executor: Executor | None = None,
    progress: Progress,
) -> list[BuiltShard]:
    """Build all shards and return them in the order of their numbers. The first error ends the run.

    ``workers=0`` builds in this process, or in one other process if images are decoded, because a decoder
    may crash. None takes the CPUs that this process may use. A given ``executor`` is used and left open.

    If a worker dies, its shard is built once more. If that worker dies, too, WorkerDied names the image it
    was at. An image that crashes a worker, and then a process that decodes it alone, is a bad image.
    """
    jobs = iter(jobs)
    first = next(jobs, None)
    if first is None:
        return []
    jobs = chain([first], jobs)
    count = usable_cpus() if workers is None else workers
    if executor is not None:
        return _Run(jobs, counters, progress).on(executor, at_once=2 * usable_cpus())
    if count == 0 and not first.options.decode_check:
        return [_built(build_shard(job), done, counters, progress) for done, job in enumerate(jobs, 1)]
    with WorkerPool(max(1, count)) as pool:
        return _Run(jobs, counters, progress).on(pool, at_once=count + 1)


def _built(shard: BuiltShard, done: int, counters: ProgressCounters, progress: Progress) -> BuiltShard:
    progress.at(*counters.total())
    tell_shards(progress, done, counters.shards)
    return shard


def in_order(built: dict[int, BuiltShard]) -> list[BuiltShard]:
    """Return the shards by number, which is not the order of their names from 100,000 on."""
    return [built[number] for number in sorted(built)]


class _Run:
    """The submitted jobs: few at a time, because a job holds its entries and an error stops the rest."""

    def __init__(self, jobs: Iterator[ShardJob], counters: ProgressCounters, progress: Progress) -> None:
        self._jobs = jobs
        self._counters = counters
        self._progress = progress
        self._pending: dict[Future[BuiltShard], ShardJob] = {}
        self._retried: set[int] = set()
        self._built: dict[int, BuiltShard] = {}

    def on(self, executor: Executor, *, at_once: int) -> list[BuiltShard]:
        try:
            self._submit(executor, islice(self._jobs, at_once))
            while self._pending:
                ready, _ = wait(self._pending, timeout=POLL_INTERVAL_S, return_when=FIRST_COMPLETED)
                before = len(self._built)
                for future in ready:
                    self._take(future, executor)
                self._progress.at(*self._counters.total())
                if len(self._built) > before:
                    tell_shards(self._progress, len(self._built), self._counters.shards)
        finally:
            for future in self._pending:
                future.cancel()
        return in_order(self._built)

    def _submit(self, executor: Executor, jobs: Iterable[ShardJob]) -> None:
        for job in jobs:
            self._pending[executor.submit(build_shard, job)] = job

    def _take(self, future: Future[BuiltShard], executor: Executor) -> None:
        job = self._pending.pop(future)
        try:
            self._built[job.shard.number] = future.result()
        except (ChildDied, ChildLost) as error:
            self._submit(executor, [self._retry(job, error)])
        else:
            self._submit(executor, islice(self._jobs, 1))

    def _retry(self, job: ShardJob, error: ChildDied | ChildLost) -> ShardJob:
        """Return the job to submit again after its worker died."""
        at = self._counters.done(job.shard.number)
        is_decoded = job.options.decode_check and at < len(job.entries) and at not in job.crashes
        if isinstance(error, ChildDied) and is_decoded and (signal := _crash_of(job, at)):
            return replace(job, crashes={**job.crashes, at: signal})
        if job.shard.number in self._retried:
            raise self._failed_twice(job, error) from error
        self._retried.add(job.shard.number)
        return job

    def _failed_twice(self, job: ShardJob, error: ChildDied | ChildLost) -> WorkerDied:
        at = min(self._counters.done(job.shard.number), len(job.entries) - 1)
        advice = "remove it" if isinstance(error, ChildDied) else "build with fewer --workers"
        return WorkerDied(
            f"{error.message} (twice, and now at this image); {advice}",
            path=job.output,
            shard=job.shard.name,
            key=job.entries["key"][at].decode(),
        )


def _crash_of(job: ShardJob, place: int) -> str:
    """Return the signal by which decoding that image alone ends a process; empty if it does not."""
    try:
        isolated(DECODE_TIMEOUT_S, decode_alone, job, place)
    except ChildDied as error:
        return error.signal
    except (ShardprepError, OSError):  # building the shard again reports it
        pass
    return ""
