"""The runner of the jobs of a join, in parallel processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future

from shardprep.formats.conversion.building.column_of_shard import BuiltColumn
from shardprep.formats.dataset.manifest import Manifest
from shardprep.formats.errors import WorkerDied
from shardprep.formats.processes.child_process import ChildDied, ChildLost
from shardprep.formats.processes.worker_pool import WorkerPool, usable_cpus
from shardprep.formats.progress import Progress, tell_shards

from .join_job import JoinJob, join_shard

Built = tuple[BuiltColumn, ...]


def run_joins(
    jobs: Iterable[JoinJob], manifest: Manifest, *, workers: int | None, progress: Progress
) -> list[Built]:
    """Build the columns of all shards, and return them in order. The first error ends the run.

    ``workers=0`` builds in this process; None takes the CPUs that this process may use. Raises WorkerDied
    if a worker dies, and what :func:`.join_job.join_shard` raises.
    """
    count = usable_cpus() if workers is None else workers
    told = _Told(manifest, progress)
    with progress.task("join", records=manifest.records, size=sum(s.size for s in manifest.shards)):
        if not count:
            return [told.done(join_shard(job)) for job in jobs]
        return _in_processes(jobs, count, told)


def _in_processes(jobs: Iterable[JoinJob], count: int, told: _Told) -> list[Built]:
    built: list[Built] = []
    with WorkerPool(count) as pool:
        waiting: deque[tuple[JoinJob, Future[Built]]] = deque()
        for job in jobs:
            waiting.append((job, pool.submit(join_shard, job)))
            if len(waiting) > count:
                built.append(told.done(_result(*waiting.popleft())))
        while waiting:
            built.append(told.done(_result(*waiting.popleft())))
    return built


def _result(job: JoinJob, future: Future[Built]) -> Built:
    try:
        return future.result()
    except (ChildDied, ChildLost) as error:
        message = f"{error.message}; repeat the command, with fewer --workers if memory is short"
        raise WorkerDied(message, path=job.output, shard=job.name) from error


class _Told:
    """The progress by shards: ``done`` is told of each, in order."""

    def __init__(self, manifest: Manifest, progress: Progress) -> None:
        self._shards = manifest.shards
        self._progress = progress
        self._count = self._records = self._size = 0

    def done(self, built: Built) -> Built:
        shard = self._shards[self._count]
        self._count, self._records, self._size = (
            self._count + 1,
            self._records + shard.records,
            self._size + shard.size,
        )
        self._progress.at(self._records, self._size)
        tell_shards(self._progress, self._count, len(self._shards))
        return built
