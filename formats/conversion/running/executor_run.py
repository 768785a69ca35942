"""The running of jobs on an executor that the caller gave: of this machine, or of many."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from functools import partial
from typing import TypeVar

from shardprep.formats.conversion.building.progress_counters import ProgressCounters
from shardprep.formats.processes.executors.executor_call import AT_ONCE, ExecutorCall
from shardprep.formats.progress import Progress

from .job_runner import Job, JobRun, run_jobs

Built = TypeVar("Built")


def run_on_executor(
    jobs: Iterable[Job[Built]],
    counters: ProgressCounters,
    *,
    executor: Executor,
    workers: int | None = None,
    progress: Progress,
) -> list[Built]:
    """Build all shards and return them in the order of their numbers. The first error ends the run.

    The executor is left open. ``workers`` is the number of jobs that are submitted at a time, None takes
    AT_ONCE. What a job raises is raised; what else the executor raises is ExecutorFailed.
    """
    run = _ExecutorRun(iter(jobs), counters, progress)
    return run.on(executor, at_once=AT_ONCE if workers is None else max(1, workers))


def runner(
    executor: Executor | None, workers: int | None, progress: Progress
) -> Callable[[Iterable[Job[Built]], ProgressCounters], list[Built]]:
    """Return what runs jobs: on the executor, or in processes of this machine if it is None."""
    if executor is None:
        return partial(run_jobs, workers=workers, progress=progress)
    return partial(run_on_executor, executor=executor, workers=workers, progress=progress)


class _ExecutorRun(JobRun[Built]):
    """A run of which each job returns its error, to tell it from one of the executor."""

    def submitted(self, job: Job[Built], executor: Executor) -> Future[Built]:
        return _call_of(job).submitted(executor)  # type: ignore[return-value]

    def value_of(self, future: Future[Built], job: Job[Built]) -> Built:
        return _call_of(job).value_of(future)  # type: ignore[arg-type]


def _call_of(job: Job[Built]) -> ExecutorCall[Built]:
    return ExecutorCall(job.build, job.output, job.shard.name, "The same call keeps the shards that are done")
