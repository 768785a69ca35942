"""The job runner: jobs that each make one file, in processes of this machine or on an executor.

In the run's folder is a file of counters, one per job: the number of records that a worker has done.
Each worker writes its own counter, so that a count outlives the worker, and no other bytes: the workers may
be on several hosts that share the file system. The parent reads the progress from the file, and the record
that a dead worker was at.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import ShardprepError, WorkerDied
from shardprep.formats.runtime.executors import AT_ONCE, ExecutorCall
from shardprep.formats.runtime.files import naming
from shardprep.formats.runtime.owned import Descriptor, Owned
from shardprep.formats.runtime.progress import NoProgress, Progress, tell_shards
from shardprep.formats.runtime.work_folder import is_of_this_host
from shardprep.formats.runtime.workers import ChildDied, ChildLost, WorkerPool, isolated, usable_cpus

COUNTERS_NAME = "counters"
# Between two counts of a worker on another host; each goes to the file server at once.
FAR_INTERVAL_S = 1.0
POLL_INTERVAL_S = 0.2
DECODE_TIMEOUT_S = 60.0  # to decode one image

Built_co = TypeVar("Built_co", covariant=True)
Built = TypeVar("Built")
K = TypeVar("K")
T = TypeVar("T")


class Unit(Protocol):
    """A file that a job makes: its ``name``, its ``number``, and the records and bytes that it is made of."""

    @property
    def name(self) -> str: ...

    @property
    def number(self) -> int: ...

    @property
    def records(self) -> int: ...

    @property
    def size(self) -> int: ...


class Job(Protocol[Built_co]):
    """The work on one file, which may be killed and repeated. Picklable.

    ``output`` is the folder of the work, and ``decodes`` whether images are decoded, which may crash.
    """

    @property
    def output(self) -> Path: ...

    @property
    def shard(self) -> Unit: ...

    @property
    def decodes(self) -> bool: ...

    def build(self) -> Built_co:
        """Build the file, and return its description."""

    def key_at(self, place: int) -> str:
        """Return the key of the file's record at that place, or of its last record."""

    def decode(self, place: int) -> None:
        """Decode one image, in a process that may crash, unless it is known to. Raises BadImage."""

    def crashed(self, place: int, signal: str) -> Self:
        """Return the job with an image that is known to crash the decoder by that signal."""


class DecodesNothing:
    """Part of a job that decodes no image."""

    decodes = False

    def decode(self, place: int) -> None:
        """Do nothing."""

    def crashed(self, place: int, signal: str) -> Self:
        """Return the job itself."""
        return self


class ProgressCounters(Owned):
    """The parent's view of all counters, in the folder of a run."""

    def __init__(self, run: Path, units: Sequence[Unit]) -> None:
        self.units = len(units)
        self._path = run / COUNTERS_NAME
        slots = 1 + max((unit.number for unit in units), default=0)
        self._path.unlink(missing_ok=True)
        with naming(self._path), self._path.open("xb") as file:
            file.write(bytes(8 * slots))  # written, not truncated to size: room on the disk is taken
        self._record_bytes = np.zeros(slots)
        for unit in units:
            self._record_bytes[unit.number] = unit.size / max(unit.records, 1)

    def done(self, number: int) -> int:
        """Return the number of records done of a unit."""
        return int(self._counts()[number])

    def total(self) -> tuple[int, int]:
        """Return the number of records, and about the number of bytes, done of all units."""
        counts = self._counts()
        return int(counts.sum()), int(counts @ self._record_bytes)

    def _counts(self) -> npt.NDArray[np.int64]:
        """Read the file. It is opened each time: NFS then shows what other hosts have written."""
        return np.fromfile(self._path, dtype="<i8")


class ShardCounter(Owned):
    """A worker's counter, in the folder of a run.

    On the host of the run each count is written, and seen there at once. Another host, which may share the
    file by NFS, writes one a second: synchronously, or NFS would keep the counts on that host, and with a
    descriptor that cannot read, because NFS may write back a whole page that was read.
    """

    def __init__(self, run: Path, number: int) -> None:
        self._is_far = not is_of_this_host(run)
        flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        self._path = run / COUNTERS_NAME
        self._file = Descriptor(os.open(self._path, flags | os.O_DSYNC if self._is_far else flags))
        self._at = 8 * number
        self._count = self._written = 0
        self._next = monotonic() + FAR_INTERVAL_S

    def set(self, count: int) -> None:
        """Publish the number of records done."""
        self._count = count
        if not self._is_far or monotonic() >= self._next:
            self._write()

    def close(self) -> None:
        """Publish the last number, and close the file."""
        try:
            if self._count != self._written:
                self._write()
        finally:
            self._file.close()

    def _write(self) -> None:
        with naming(self._path):
            os.pwrite(self._file.fileno(), self._count.to_bytes(8, "little"), self._at)
        self._written = self._count
        self._next = monotonic() + FAR_INTERVAL_S


def completed(
    take: Callable[[], K | None], submit: Callable[[K], Future[T]], at_once: int
) -> Generator[tuple[K, Future[T]] | None]:
    """Submit what ``take`` returns until that is None, and yield each with its future once it is done.

    At most ``at_once`` are submitted at a time. None is yielded after each wait, of POLL_INTERVAL_S at most.
    ``take`` is called again after each yield. After an error, pending calls are cancelled.
    """
    pending: dict[Future[T], K] = {}
    try:
        while True:
            while len(pending) < at_once and (key := take()) is not None:
                pending[submit(key)] = key
            if not pending:
                return
            wait(pending, timeout=POLL_INTERVAL_S, return_when=FIRST_COMPLETED)
            for future in [each for each in pending if each.done()]:  # wait() misses cancelled ones
                yield pending.pop(future), future
            yield None
    finally:
        for future in pending:
            future.cancel()


@dataclass(frozen=True)
class JobRunner(Owned):
    """Runs jobs in processes of this machine, or on an ``executor``, which is left open.

    ``workers`` is the number of processes: None is one per CPU that this process may use, and 0 builds in
    this process, or in one other process if images are decoded, because a decoder may crash. With an executor
    it is the number of jobs that are submitted at a time, and None is AT_ONCE.
    """

    workers: int | None = None
    executor: Executor | None = None
    progress: Progress = field(default_factory=NoProgress)

    def run(
        self,
        title: str,
        jobs: Iterable[Job[Built]],
        folder: Path,
        units: Sequence[Unit],
        done: Collection[str] = (),
    ) -> list[Built]:
        """Run the jobs of all units as one task, and return what they built, in the order of their numbers.

        ``folder`` is that of the run, and ``done`` are the names of units that are built already.

        The first error ends the run. Errors of the executor itself are raised as ExecutorFailed. If a
        worker of this machine dies, its job runs once more. If that worker dies, too, WorkerDied names the
        record it was at. An image that crashes a worker, and then a process that decodes it alone, is a bad
        image.
        """
        left = [unit for unit in units if unit.name not in done]
        records, size = sum(unit.records for unit in left), sum(unit.size for unit in left)
        run = _Run(deque(), iter(jobs), ProgressCounters(folder, units), self.progress)
        with self.progress.task(title, records=records, size=size):
            return self._built(run)

    def _built(self, run: _Run[Built]) -> list[Built]:
        if self.executor is not None:
            return run.on(self.executor, AT_ONCE if self.workers is None else max(1, self.workers))
        first = run.take()
        if first is None:
            return []
        run.again.append(first)
        count = usable_cpus() if self.workers is None else self.workers
        if count == 0 and not first.decodes:
            return run.here()
        with WorkerPool(max(1, count)) as pool:
            return run.on(pool, count + 1)


@dataclass
class _Run(Generic[Built]):
    """One run. ``jobs`` are taken few at a time, because a job holds its entries; ``again`` come first."""

    again: deque[Job[Built]]
    jobs: Iterator[Job[Built]]
    counters: ProgressCounters
    progress: Progress
    built: dict[int, Built] = field(default_factory=dict)
    retried: set[int] = field(default_factory=set)

    def take(self) -> Job[Built] | None:
        return self.again.popleft() if self.again else next(self.jobs, None)

    def here(self) -> list[Built]:
        while (job := self.take()) is not None:
            self.built[job.shard.number] = job.build()
            self._tell(len(self.built) - 1)
        return self._in_order()

    def on(self, executor: Executor, at_once: int) -> list[Built]:
        is_pool, told = isinstance(executor, WorkerPool), 0

        def submit(job: Job[Built]) -> Future[Any]:
            return executor.submit(_build, job) if is_pool else _call_of(job).submitted(executor)

        with closing(completed(self.take, submit, at_once)) as finished:
            for done in finished:
                if done is None:
                    self._tell(told)
                    told = len(self.built)
                    continue
                job, future = done
                try:
                    value = future.result() if is_pool else _call_of(job).value_of(future)
                except (ChildDied, ChildLost) as error:
                    self.again.append(self._retry(job, error))
                else:
                    self.built[job.shard.number] = value
        return self._in_order()

    def _in_order(self) -> list[Built]:
        """By number, which is not the order of names from 100,000 shards on."""
        return [self.built[number] for number in sorted(self.built)]

    def _tell(self, before: int) -> None:
        self.progress.at(*self.counters.total())
        if len(self.built) > before:
            tell_shards(self.progress, len(self.built), self.counters.units)

    def _retry(self, job: Job[Built], error: ChildDied | ChildLost) -> Job[Built]:
        """Return the job to submit again after its worker died."""
        number, at = job.shard.number, self.counters.done(job.shard.number)
        if isinstance(error, ChildDied) and job.decodes and (signal := _crash_of(job, at)):
            return job.crashed(at, signal)
        if number in self.retried:
            advice = "remove it" if isinstance(error, ChildDied) else "build with fewer --workers"
            raise WorkerDied(
                f"{error.message} (twice, the second time at this record); {advice}",
                path=job.output,
                shard=job.shard.name,
                key=job.key_at(at),
            ) from error
        self.retried.add(number)
        return job


def _build(job: Job[Built]) -> Built:
    return job.build()


def _decode(job: Job[Built], place: int) -> None:
    job.decode(place)


def _crash_of(job: Job[Built], place: int) -> str:
    """Return the signal that kills a process which decodes that image alone; empty if none does."""
    try:
        isolated(DECODE_TIMEOUT_S, _decode, job, place)
    except ChildDied as error:
        return error.signal
    except (ShardprepError, OSError):  # building the file again reports it
        pass
    return ""


def _call_of(job: Job[Built]) -> ExecutorCall[Built]:
    return ExecutorCall(job.build, job.output, job.shard.name, "Run it again: finished shards are kept")
