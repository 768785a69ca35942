"""Running shard jobs in parallel processes, on any executor, through death and interruption."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from itertools import islice

from .board import Board
from .build import BuiltShard, ShardJob, build_shard
from .child import ChildDied, ChildLost
from .errors import WorkerDied
from .pool import WorkerPool, usable_cpus
from .progress import Progress

POLL_SECONDS = 0.2


def run_jobs(
    jobs: Iterable[ShardJob],
    board: Board,
    *,
    workers: int | None = None,
    executor: Executor | None = None,
    progress: Progress,
) -> list[BuiltShard]:
    """Build all shards; the result is in the order of their numbers. The first error ends the run.

    ``workers=0`` builds in this process; None takes the CPUs that this process may use. A given
    ``executor`` is used as it is and left open. A shard whose worker dies is built once more; then
    WorkerDied names the image that it was at.
    """
    count = usable_cpus() if workers is None else workers
    if executor is not None:
        return _Run(iter(jobs), board, progress).on(executor, at_once=2 * usable_cpus())
    if count == 0:
        return [_built(build_shard(job), board, progress) for job in jobs]
    with WorkerPool(count) as pool:
        return _Run(iter(jobs), board, progress).on(pool, at_once=count + 1)


def _built(shard: BuiltShard, board: Board, progress: Progress) -> BuiltShard:
    progress.at(*board.total())
    return shard


def in_order(built: dict[int, BuiltShard]) -> list[BuiltShard]:
    """Shards by number, which is not the order of their names from 100,000 on."""
    return [built[number] for number in sorted(built)]


class _Run:
    """Jobs under way: few at a time, because a job holds its entries and errors should stop the rest."""

    def __init__(self, jobs: Iterator[ShardJob], board: Board, progress: Progress) -> None:
        self._jobs = jobs
        self._board = board
        self._progress = progress
        self._flying: dict[Future[BuiltShard], ShardJob] = {}
        self._retried: set[int] = set()
        self._built: dict[int, BuiltShard] = {}

    def on(self, executor: Executor, *, at_once: int) -> list[BuiltShard]:
        try:
            self._submit(executor, islice(self._jobs, at_once))
            while self._flying:
                ready, _ = wait(self._flying, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
                for future in ready:
                    self._take(future, executor)
                self._progress.at(*self._board.total())
        finally:
            for future in self._flying:
                future.cancel()
        return in_order(self._built)

    def _submit(self, executor: Executor, jobs: Iterable[ShardJob]) -> None:
        for job in jobs:
            self._flying[executor.submit(build_shard, job)] = job

    def _take(self, future: Future[BuiltShard], executor: Executor) -> None:
        job = self._flying.pop(future)
        try:
            self._built[job.shard.number] = future.result()
        except (ChildDied, ChildLost) as error:
            if job.shard.number in self._retried:
                raise self._twice(job, error) from error
            self._retried.add(job.shard.number)
            self._submit(executor, [job])
        else:
            self._submit(executor, islice(self._jobs, 1))

    def _twice(self, job: ShardJob, error: ChildDied | ChildLost) -> WorkerDied:
        at = min(self._board.done(job.shard.number), len(job.entries) - 1)
        return WorkerDied(
            f"{error.message} (twice, and now at this image); build with fewer --workers",
            path=job.output,
            shard=job.shard.name,
            key=job.entries["key"][at].decode(),
        )
