"""Running shard jobs in parallel processes, on any executor, through death and interruption."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from itertools import islice

from .board import Board
from .build import BuiltShard, ShardJob, build_shard
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
    """Build all shards; the result is in the jobs' order. The first error ends the run.

    ``workers=0`` builds in this process; None takes the CPUs that this process may use. A given
    ``executor`` is used as it is and left open; our own replaces workers that die, once per shard.
    """
    if executor is not None:
        return _run(iter(jobs), executor, board, progress, at_once=2 * usable_cpus())
    count = usable_cpus() if workers is None else workers
    if count == 0:
        return [_built(build_shard(job), board, progress) for job in jobs]
    return _run_in_pools(iter(jobs), count, board, progress)


def _built(shard: BuiltShard, board: Board, progress: Progress) -> BuiltShard:
    progress.at(*board.total())
    return shard


def _run_in_pools(
    jobs: Iterator[ShardJob], workers: int, board: Board, progress: Progress
) -> list[BuiltShard]:
    built: dict[int, BuiltShard] = {}
    while True:
        flying = _Flying(jobs, board, progress)
        try:
            with WorkerPool(workers) as pool:
                return in_order(built | flying.run(pool, at_once=workers + 1))
        except BrokenExecutor:
            built |= flying.done
            built |= {job.shard.number: _build_alone(job, board) for job in flying.left()}


def in_order(built: dict[int, BuiltShard]) -> list[BuiltShard]:
    """Shards by number, which is not the order of their names from 100,000 on."""
    return [built[number] for number in sorted(built)]


def _build_alone(job: ShardJob, board: Board) -> BuiltShard:
    """Build a shard whose worker may have died, in a process of its own, so that blame is certain."""
    try:
        with WorkerPool(1) as pool:
            return pool.submit(build_shard, job).result()
    except BrokenExecutor as error:
        at = min(board.done(job.shard.number), len(job.entries) - 1)
        raise WorkerDied(
            "a worker process died twice at this image (out of memory?); build with fewer --workers",
            path=job.output,
            shard=job.shard.name,
            key=job.entries["key"][at].decode(),
        ) from error


def _run(
    jobs: Iterator[ShardJob], executor: Executor, board: Board, progress: Progress, *, at_once: int
) -> list[BuiltShard]:
    flying = _Flying(jobs, board, progress)
    try:
        return in_order(flying.run(executor, at_once=at_once))
    finally:
        flying.cancel()


class _Flying:
    """Jobs under way: few at a time, because a job holds its entries and errors should stop the rest."""

    def __init__(self, jobs: Iterator[ShardJob], board: Board, progress: Progress) -> None:
        self._jobs = jobs
        self._board = board
        self._progress = progress
        self._futures: dict[Future[BuiltShard], ShardJob] = {}
        self._unsent: list[ShardJob] = []
        self.done: dict[int, BuiltShard] = {}

    def run(self, executor: Executor, *, at_once: int) -> dict[int, BuiltShard]:
        self._submit(executor, at_once)
        while self._futures:
            ready, _ = wait(self._futures, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
            for future in ready:
                self.done[self._futures[future].shard.number] = future.result()
                del self._futures[future]
                self._submit(executor, 1)
            self._progress.at(*self._board.total())
        return self.done

    def _submit(self, executor: Executor, count: int) -> None:
        for job in islice(self._jobs, count):
            self._unsent = [job]  # submit() raises where the pool is broken, and the job must not be lost
            self._futures[executor.submit(build_shard, job)] = job
            self._unsent = []

    def left(self) -> list[ShardJob]:
        """The jobs taken that have not been counted as done."""
        return [*self._futures.values(), *self._unsent]

    def cancel(self) -> None:
        for future in self._futures:
            future.cancel()
