"""The running of jobs on an executor that the caller gave: of this machine, or of many."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from functools import partial
from typing import TypeVar

from shardprep.formats.conversion.building.progress_counters import ProgressCounters
from shardprep.formats.errors import OperationError, ShardprepError
from shardprep.formats.progress import Progress

from .job_runner import Job, JobRun, run_jobs

# The workers that an executor has are not known: Executor has no such attribute, and a cluster grows. A job
# takes 80 bytes per image, which is 200 KB for a shard of 256 MiB, so that 256 of them take 50 MB here.
AT_ONCE = 256

Built = TypeVar("Built")


class ExecutorFailed(OperationError):
    """An executor lost a job, was shut down, or could not run it; ``shard`` is the job's."""


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
        try:
            return executor.submit(_built_or_error, job)  # type: ignore[arg-type]
        except Exception as error:
            raise _failed(error, job) from error

    def value_of(self, future: Future[Built], job: Job[Built]) -> Built:
        try:
            value = future.result()
        except Exception as error:
            raise _failed(error, job) from error
        except BaseException as error:
            if type(error).__name__ != "CancelledError":  # asyncio's, which engines raise, is no Exception
                raise
            raise _failed(error, job) from error
        if isinstance(value, BaseException):
            raise value
        return value


def _built_or_error(job: Job[Built]) -> Built | Exception:
    """Build a shard. An unexpected error gets the worker's traceback as a note."""
    try:
        return job.build()
    except (ShardprepError, OSError, MemoryError) as error:
        return error
    except Exception as error:
        error.add_note(traceback.format_exc())
        return error


def _failed(error: BaseException, job: Job[Built]) -> ExecutorFailed:
    said = f"{type(error).__name__}: {error}".removesuffix(": ")
    return ExecutorFailed(
        f"the executor did not run this shard's job ({said}); see whether its workers live, can be reached and "
        "have this version of shardprep. The same call keeps the shards that are done",
        path=job.output,
        shard=job.shard.name,
    )
