"""The jobs of a plan's shards, run in processes of this machine or on an executor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Generic, Protocol, Self, TypeVar

from shardprep.formats.conversion.plan import Plan, PlannedShard
from shardprep.formats.conversion.shard import ShardJob
from shardprep.formats.conversion.work_folder import ProgressCounters, WorkFolder
from shardprep.formats.errors import ShardprepError, WorkerDied
from shardprep.formats.runtime.executors import AT_ONCE, ExecutorCall
from shardprep.formats.runtime.progress import Progress, tell_shards
from shardprep.formats.runtime.workers import ChildDied, ChildLost, WorkerPool, isolated, usable_cpus
from shardprep.formats.shards.read import IN_PLACE
from shardprep.formats.sources.source import ByteReader


def shard_jobs(
    planned: Plan,
    shards: Iterable[PlannedShard],
    reader: ByteReader,
    work_folder: WorkFolder,
    *,
    expected: dict[str, str] | None = None,
    wanted: frozenset[str] | None = None,
    home: Mapping[str, str] | None = None,
) -> Iterator[ShardJob]:
    """Yield the jobs of some of a plan's shards, one at a time, because a job holds its entries.

    ``expected`` maps the names of shards, and of columns' shards, to the SHA-256 that they must have to be
    published; ``wanted`` are those that are written, None for all. ``home`` is that of the jobs, of which
    the paths are absolute: another process has another current folder.
    """
    archive = reader.archive if planned.options.container == IN_PLACE else None
    regions = planned.regions(archive.size) if archive else ()
    for shard in shards:
        entries = planned.entries_of(shard)
        yield ShardJob(
            output=work_folder.output.absolute(),
            run=work_folder.run.absolute(),
            shard=shard,
            entries=entries,
            reader=reader.only(entries),
            options=planned.options,
            plan=planned.work_digest,
            key_bytes=planned.key_bytes,
            schema=planned.schema,
            has_images=planned.has_images,
            expected_sha256=expected or {},
            wanted=wanted,
            region=regions[shard.number] if regions else None,
            home=home,
        )


POLL_INTERVAL_S = 0.2
DECODE_TIMEOUT_S = 60.0  # to decode one image

Built_co = TypeVar("Built_co", covariant=True)
Built = TypeVar("Built")


class Job(Protocol[Built_co]):
    """The work on one shard, which may be killed and repeated. Picklable.

    ``output`` is the folder of the work, and ``decodes`` whether images are decoded, which may crash.
    """

    @property
    def output(self) -> Path: ...

    @property
    def shard(self) -> PlannedShard: ...

    @property
    def decodes(self) -> bool: ...

    def build(self) -> Built_co:
        """Build the shard, and return what is known of it."""

    def key_at(self, place: int) -> str:
        """Return the key of the shard's record at that place, or of its last record."""

    def decode(self, place: int) -> None:
        """Decode one image, in a process that may crash, unless it is known to. Raises BadImage."""

    def crashed(self, place: int, signal: str) -> Self:
        """Return the job with an image that is known to crash the decoder by that signal."""


def run_jobs(
    jobs: Iterable[Job[Built]],
    counters: ProgressCounters,
    *,
    workers: int | None = None,
    progress: Progress,
) -> list[Built]:
    """Build all shards and return them in the order of their numbers. The first error ends the run.

    ``workers=0`` builds in this process, or in one other process if images are decoded, because a decoder
    may crash. None takes the CPUs that this process may use.

    If a worker dies, its shard is built once more. If that worker dies, too, WorkerDied names the image it
    was at. An image that crashes a worker, and then a process that decodes it alone, is a bad image.
    """
    jobs = iter(jobs)
    first = next(jobs, None)
    if first is None:
        return []
    jobs = chain([first], jobs)
    count = usable_cpus() if workers is None else workers
    if count == 0 and not first.decodes:
        return [_built(job.build(), done, counters, progress) for done, job in enumerate(jobs, 1)]
    with WorkerPool(max(1, count)) as pool:
        return JobRun(jobs, counters, progress).on(pool, at_once=count + 1)


def _built(shard: Built, done: int, counters: ProgressCounters, progress: Progress) -> Built:
    progress.at(*counters.total())
    tell_shards(progress, done, counters.shards)
    return shard


def in_order(built: dict[int, Built]) -> list[Built]:
    """Return the shards by number, which is not the order of their names from 100,000 on."""
    return [built[number] for number in sorted(built)]


class JobRun(Generic[Built]):
    """The submitted jobs: few at a time, because a job holds its entries and an error stops the rest."""

    def __init__(self, jobs: Iterator[Job[Built]], counters: ProgressCounters, progress: Progress) -> None:
        self._jobs = jobs
        self._counters = counters
        self._progress = progress
        self._pending: dict[Future[Built], Job[Built]] = {}
        self._retried: set[int] = set()
        self._built: dict[int, Built] = {}

    def on(self, executor: Executor, *, at_once: int) -> list[Built]:
        """Build all shards on the executor, of which ``at_once`` are submitted; return them in order."""
        try:
            self._submit(executor, islice(self._jobs, at_once))
            while self._pending:
                wait(self._pending, timeout=POLL_INTERVAL_S, return_when=FIRST_COMPLETED)
                before = len(self._built)
                for future in [each for each in self._pending if each.done()]:  # wait() misses cancelled ones
                    self._take(future, executor)
                self._progress.at(*self._counters.total())
                if len(self._built) > before:
                    tell_shards(self._progress, len(self._built), self._counters.shards)
        finally:
            for future in self._pending:
                future.cancel()
        return in_order(self._built)

    def _submit(self, executor: Executor, jobs: Iterable[Job[Built]]) -> None:
        for job in jobs:
            self._pending[self.submitted(job, executor)] = job

    def submitted(self, job: Job[Built], executor: Executor) -> Future[Built]:
        """Submit a job."""
        return executor.submit(_build, job)

    def value_of(self, future: Future[Built], job: Job[Built]) -> Built:
        """Return, or raise, what the job did. Raises ChildDied and ChildLost for one to submit again."""
        return future.result()

    def _take(self, future: Future[Built], executor: Executor) -> None:
        job = self._pending.pop(future)
        try:
            self._built[job.shard.number] = self.value_of(future, job)
        except (ChildDied, ChildLost) as error:
            self._submit(executor, [self._retry(job, error)])
        else:
            self._submit(executor, islice(self._jobs, 1))

    def _retry(self, job: Job[Built], error: ChildDied | ChildLost) -> Job[Built]:
        """Return the job to submit again after its worker died."""
        at = self._counters.done(job.shard.number)
        if isinstance(error, ChildDied) and job.decodes and (signal := _crash_of(job, at)):
            return job.crashed(at, signal)
        if job.shard.number in self._retried:
            raise self._failed_twice(job, error) from error
        self._retried.add(job.shard.number)
        return job

    def _failed_twice(self, job: Job[Built], error: ChildDied | ChildLost) -> WorkerDied:
        advice = "remove it" if isinstance(error, ChildDied) else "build with fewer --workers"
        return WorkerDied(
            f"{error.message} (twice, and now at this image); {advice}",
            path=job.output,
            shard=job.shard.name,
            key=job.key_at(self._counters.done(job.shard.number)),
        )


def _build(job: Job[Built]) -> Built:
    return job.build()


def _decode(job: Job[Built], place: int) -> None:
    job.decode(place)


def _crash_of(job: Job[Built], place: int) -> str:
    """Return the signal by which decoding that image alone ends a process; empty if it does not."""
    try:
        isolated(DECODE_TIMEOUT_S, _decode, job, place)
    except ChildDied as error:
        return error.signal
    except (ShardprepError, OSError):  # building the shard again reports it
        pass
    return ""


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
    return ExecutorCall(job.build, job.output, job.shard.name, "Run it again: finished shards are kept")
