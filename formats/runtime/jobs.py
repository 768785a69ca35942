"""The job runner: runs jobs, which make one file each, in local processes or on an executor, such as Ray's.

Workers count the records they have done in a file in the run's folder, which has one counter per job. The
counts survive the workers: the parent reads from them the progress, and the record at which a worker died.
Each worker writes only its own counter, because workers may be on several hosts that share the file system.
"""

from __future__ import annotations

import os
import socket
import threading
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, InvalidStateError, wait as await_all
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Generic, ParamSpec, Self, TypeVar

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import MissingExtra, OperationError, ShardprepError, WorkerDied
from shardprep.formats.runtime.files import name_in_os_errors
from shardprep.formats.runtime.owners import Descriptor, Owner
from shardprep.formats.runtime.processes import ChildDied, ChildLost, WorkerPool, call_isolated, usable_cpus
from shardprep.formats.runtime.progress import NoProgress, Progress, check_int, report_shards

COUNTERS_NAME = "counters"
POLL_INTERVAL_S = 0.2
DECODE_TIMEOUT_S = 60.0  # to decode one image

Built = TypeVar("Built")
K = TypeVar("K")
T = TypeVar("T")
P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class Unit:
    """A file that a job makes of the records at positions ``first`` (inclusive) to ``last`` (exclusive).

    ``size`` is an upper bound of the records' bytes, ``key_bytes`` the width of their keys.
    """

    name: str
    number: int
    first: int
    last: int
    size: int
    key_bytes: int = 0

    @property
    def records(self) -> int:
        """The number of records, including bad ones."""
        return self.last - self.first


class Job(ABC, Generic[Built]):
    """Base of the work on one file, safe to kill and repeat. Picklable.

    ``output`` is the output folder. ``decodes`` is whether it is expected to decode images, which may crash.
    """

    output: Path
    shard: Unit

    @property
    def decodes(self) -> bool:
        return False

    @abstractmethod
    def build(self) -> Built:
        """Build the file, and return its description."""

    @abstractmethod
    def key_at(self, place: int) -> str:
        """Return the key of the record at this position, or of the last record."""

    def decode(self, place: int) -> None:
        """Decode one image, unless it is known to crash. Raises BadImage; the process may crash."""

    def with_crash_at(self, place: int, signal: str) -> Self:
        """Return the job, with the image at ``place`` known to crash the decoder with this signal."""
        return self


class ProgressCounters(Owner):
    """The parent's view of a run's counters."""

    def __init__(self, run: Path, units: Sequence[Unit]) -> None:
        self.units = len(units)
        self._path = run / COUNTERS_NAME
        slots = 1 + max((unit.number for unit in units), default=0)
        self._path.unlink(missing_ok=True)
        with name_in_os_errors(self._path), self._path.open("xb") as file:
            file.write(bytes(8 * slots))  # zeros, not a hole, so the disk cannot be full later
        self._record_bytes = np.zeros(slots)
        for unit in units:
            self._record_bytes[unit.number] = unit.size / max(unit.records, 1)

    def records_done(self, number: int) -> int:
        return int(self._counts()[number])

    def totals(self) -> tuple[int, int]:
        """Return the number of records done of all units, and about how many bytes these are."""
        counts = self._counts()
        return int(counts.sum()), int(counts @ self._record_bytes)

    def _counts(self) -> npt.NDArray[np.int64]:
        return np.fromfile(self._path, dtype="<i8")  # reopened each time: NFS then shows other hosts' writes


def counted_range(run: Path, number: int, count: int) -> Generator[int]:
    """Yield 0 to ``count`` - 1, and note how many are done in a unit's counter in the folder of a run.

    The parent on the same host reads it at once. A worker on another host may share the file over NFS, which
    shows the counts when the file is closed. The descriptor is write-only, because NFS may write back a whole
    page that was read.
    """
    path = run / COUNTERS_NAME
    flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    with name_in_os_errors(path), closing(Descriptor(os.open(path, flags))) as file:
        for done in range(count + 1):
            os.pwrite(file.fileno(), done.to_bytes(8, "little"), 8 * number)
            if done < count:
                yield done


def completed_calls(
    take: Callable[[], K | None], submit: Callable[[K], Future[T]], at_once: int
) -> Generator[tuple[K, Future[T]] | None]:
    """Submit each key from ``take`` until that returns None; yield the key with its future once done.

    At most ``at_once`` are pending. Yields None after each wait, which takes at most POLL_INTERVAL_S. Calls
    ``take`` again after each yield. Cancels pending calls when closed or after an error.
    """
    pending: dict[Future[T], K] = {}
    done: SimpleQueue[Future[T]] = SimpleQueue()
    try:
        while True:
            while len(pending) < at_once and (key := take()) is not None:
                pending[future := submit(key)] = key
                future.add_done_callback(done.put)
            if not pending:
                return
            # not by futures.wait(): an interruption within it would leave the futures' locks held
            with suppress(Empty):
                ended = done.get(timeout=POLL_INTERVAL_S)
                while True:
                    yield pending.pop(ended), ended
                    ended = done.get_nowait()
            yield None
    finally:
        for future in pending:
            future.cancel()


@dataclass(frozen=True)
class JobRunner(Owner):
    """Runs jobs in local processes, or on an ``executor``, which is left open.

    ``workers`` is the number of processes. None is one per usable CPU. 0 builds in this process, and in one
    other process from the first job that decodes images, because a decoder may crash. With an executor,
    ``workers`` is the number of jobs submitted at a time, and None is AT_ONCE.
    """

    workers: int | None = None
    executor: Executor | None = None
    progress: Progress = field(default_factory=NoProgress)

    def __post_init__(self) -> None:
        if self.workers is not None:
            check_int(self.workers, "workers", least=0)

    def run(
        self,
        title: str,
        jobs: Iterable[Job[Built]],
        folder: Path,
        units: Sequence[Unit],
        done: Collection[str] = (),
    ) -> list[Built]:
        """Run the jobs of all units as one task; return their results in the order of the units' numbers.

        ``folder`` is the run's folder, and ``done`` has the names of units that are built already. The first
        error ends the run; errors of the executor itself are raised as ExecutorFailed.

        If a local worker dies, its job runs again. If that worker dies as well, WorkerDied names the record
        it was at. An image that crashes a worker, and then a process that decodes it alone, is a bad image.
        """
        remaining = [unit for unit in units if unit.name not in done]
        records, size = sum(unit.records for unit in remaining), sum(unit.size for unit in remaining)
        earlier = {unit.number for unit in units if unit.name in done}
        run = _Run(iter(jobs), ProgressCounters(folder, units), self.progress, earlier)
        with self.progress.task(title, records=records, size=size):
            if self.executor is not None:
                run.build_on(self.executor, AT_ONCE if self.workers is None else max(1, self.workers))
            else:
                count = usable_cpus() if self.workers is None else self.workers
                if (first := run.build_here() if count == 0 else run.next_job()) is not None:
                    run.repeated.append(first)
                    with WorkerPool(max(1, count)) as pool:
                        run.build_on(pool, count + 1)
        return [run.built[number] for number in sorted(run.built)]


@dataclass
class _Run(Generic[Built]):
    """One run. ``jobs`` is lazy, because each job holds its entries; jobs in ``repeated`` run first."""

    jobs: Iterator[Job[Built]]
    counters: ProgressCounters
    progress: Progress
    earlier: set[int]  # numbers of the units that were done before, which are no part of the progress
    repeated: deque[Job[Built]] = field(default_factory=deque)
    built: dict[int, Built] = field(default_factory=dict)
    reported: int = 0
    retried: set[int] = field(default_factory=set)

    def next_job(self) -> Job[Built] | None:
        return self.repeated.popleft() if self.repeated else next(self.jobs, None)

    def build_here(self) -> Job[Built] | None:
        """Build in this process until a job decodes images, and return that job."""
        while (job := self.next_job()) is not None and not job.decodes:
            self.built[job.shard.number] = job.build()
            self._report()
        return job

    def build_on(self, executor: Executor, at_once: int) -> None:
        is_pool = isinstance(executor, WorkerPool)

        def submit(job: Job[Built]) -> Future[Any]:
            return executor.submit(job.build) if is_pool else _executor_call(job).submit_to(executor)

        with closing(completed_calls(self.next_job, submit, at_once)) as finished:
            for done in finished:
                if done is None:
                    self._report()
                    continue
                job, future = done
                try:
                    value = future.result() if is_pool else _executor_call(job).result_of(future)
                except (ChildDied, ChildLost) as error:
                    self.repeated.append(self._retry(job, error))
                else:
                    self.built[job.shard.number] = value

    def _report(self) -> None:
        self.progress.at(*self.counters.totals())
        if (count := len(self.built.keys() - self.earlier)) > self.reported:
            self.reported = count
            report_shards(self.progress, count, self.counters.units - len(self.earlier))

    def _retry(self, job: Job[Built], error: ChildDied | ChildLost) -> Job[Built]:
        """Return the job to submit again after its worker died. Raises WorkerDied the second time."""
        number, at = job.shard.number, self.counters.records_done(job.shard.number)
        if isinstance(error, ChildDied):
            try:
                call_isolated(DECODE_TIMEOUT_S, job.decode, at)
            except ChildDied as crash:
                return job.with_crash_at(at, crash.signal)
            except (ShardprepError, OSError):  # reported when the file is built again
                pass
        if number in self.retried:
            advice = "; remove it" if isinstance(error, ChildDied) else ""
            raise WorkerDied(
                f"{error.message} (twice, the second time at this record){advice}",
                path=job.output,
                shard=job.shard.name,
                key=job.key_at(at),
            ) from error
        self.retried.add(number)
        return job


def _executor_call(job: Job[Built]) -> ExecutorCall[Built]:
    return ExecutorCall(job.build, job.output, job.shard.name, "Run it again: finished shards are kept")


# The number of workers is unknown: Executor has no attribute for it, and a cluster may grow. A call takes 80
# bytes per image, or 200 KB for a shard of 256 MiB; 256 calls take 50 MB in this process.
AT_ONCE = 256


class ExecutorFailed(OperationError):
    """An executor could not run a call, lost it, or was shut down. ``shard`` is the call's shard."""


@dataclass(frozen=True, eq=False)
class ExecutorCall(Generic[T]):
    """A picklable call for a shard or another file of the dataset at ``path``.

    The call returns its errors, which tells them from the executor's own. ``advice`` ends the message about
    these, and says what a second run keeps.
    """

    call: Callable[[], T]
    path: str | os.PathLike[str]
    shard: str
    advice: str = "Then run it again"

    def submit_to(self, executor: Executor) -> Future[T | Exception]:
        """Submit the call. Raises ExecutorFailed if the executor refuses it."""
        try:
            return executor.submit(_value_or_error, self.call)
        except Exception as error:
            raise self._executor_error(error) from error

    def result_of(self, future: Future[T | Exception]) -> T:
        """Return the call's result, or raise its error; ExecutorFailed for an error of the executor."""
        try:
            value = future.result()
        except BaseException as error:
            # asyncio's CancelledError, which some executors raise, is not an Exception.
            if isinstance(error, Exception) or type(error).__name__ == "CancelledError":
                raise self._executor_error(error) from error
            raise
        if isinstance(value, Exception):
            raise value
        return value

    def _executor_error(self, error: BaseException) -> ExecutorFailed:
        first_line = next((line for line in str(error).splitlines() if line.strip()), "")  # logs may follow
        reason = f"{type(error).__name__}: {first_line}".removesuffix(": ")
        return ExecutorFailed(
            f"the executor did not run this shard's job ({reason}); check that its workers are alive, "
            f"reachable and have this version of shardprep. {self.advice}",
            path=self.path,
            shard=self.shard,
        )


def _value_or_error(call: Callable[[], T]) -> T | Exception:
    """Return the call's result or error. An unexpected error gets the worker's traceback as a note."""
    try:
        return call()
    except (ShardprepError, OSError, MemoryError) as error:
        return error
    except Exception as error:
        error.add_note(traceback.format_exc())
        return error


class OtherMachine(OperationError):
    """A machine sees a different source or output, or has different library versions."""


def other_machine_error(text: str, path: str | os.PathLike[str] | None = None) -> OtherMachine:
    return OtherMachine(f"the machine {socket.gethostname()} {text}", path=path)


def refuse_other_versions(home: Mapping[str, str], here: Mapping[str, str], work: str) -> None:
    """Raise OtherMachine if the versions ``here`` differ from those at ``home``, where the work began."""
    differing = [name for name in {**home, **here} if home.get(name) != here.get(name)]
    if differing:
        theirs, ours = (", ".join(f"{n} {v.get(n, 'none')}" for n in differing) for v in (home, here))
        raise other_machine_error(
            f"has {ours}, but the {work} was begun with {theirs}; install those versions there"
        )


RETRIES = 3  # of a task whose worker was killed; also Ray's default

# Ray ends a connected process, with exit code 1, once the head has been silent for a minute.
HEAD_INTERVAL_S = 2.0
HEAD_SILENT_S = 20.0


class RayExecutor(Owner, Executor):
    """Runs each call as a task of the Ray cluster to which ``ray.init`` connected this process.

    ``options`` are passed to ``ray.remote``, for example ``num_cpus`` and ``resources``. A task whose worker
    is killed is retried up to RETRIES times. Cancelling a call does not stop its task. Once the cluster is
    gone, calls raise ConnectionError. Shutting down the executor leaves the connection open. Raises
    MissingExtra without Ray, and ConnectionError without a connection.
    """

    def __init__(self, **options: Any) -> None:
        try:
            import ray  # only with the extra ray
        except ImportError as error:
            raise MissingExtra.of("RayExecutor", "Ray", "ray") from error
        self._ray: Any = ray
        self._refuse_unconnected()
        self._task: Any = ray.remote(**{"max_retries": RETRIES, **options})(_call)
        self._pending: set[Future[Any]] = set()
        self._end = threading.Event()
        self._silent = ""  # the head's address once it is silent
        if not self._ray.util.client.ray.is_connected():  # a ray:// client watches its own connection
            head = self._ray.get_runtime_context().gcs_address
            threading.Thread(target=self._watch, args=(head,), name="shardprep-ray", daemon=True).start()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a call as a task. Raises ConnectionError, and RuntimeError after a shutdown."""
        if self._end.is_set():
            raise RuntimeError("cannot schedule new futures after shutdown")
        self._refuse_unconnected()
        reference = self._task.remote(fn, args, kwargs)
        future: Future[T] = Future()  # cancelling Ray's own future would end a thread of Ray
        self._pending.add(future)
        self._fail_if_silent()  # the watch fails only the calls it sees
        future.add_done_callback(self._pending.discard)
        reference.future().add_done_callback(partial(_settle, future))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Shut down, and optionally ``wait`` for pending calls. Idempotent."""
        self._end.set()
        pending = list(self._pending)
        for future in pending if cancel_futures else ():
            future.cancel()
        if wait:
            await_all([future for future in pending if not future.cancelled()])  # it would hang

    def _refuse_unconnected(self) -> None:
        if not self._ray.is_initialized():  # a call would make Ray start a cluster of its own
            raise ConnectionError("Ray is not connected to a cluster")

    def _watch(self, head: str) -> None:
        """Fail all calls once the head at this address has been silent for HEAD_SILENT_S."""
        silent_s = 0.0  # counted by attempts: this process may be stopped meanwhile, as by Ctrl-Z
        while not self._end.wait(HEAD_INTERVAL_S):
            silent_s = 0.0 if _is_reachable(head) else silent_s + HEAD_INTERVAL_S
            if silent_s > HEAD_SILENT_S:
                self._silent = head
                self._end.set()
                self._fail_if_silent()

    def _fail_if_silent(self) -> None:
        for future in list(self._pending) if self._silent else ():
            with suppress(InvalidStateError):  # already done
                future.set_exception(ConnectionError(f"the head of Ray at {self._silent} does not answer"))


def _call(fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
    return fn(*args, **kwargs)


def _settle(future: Future[T], done: Future[T]) -> None:
    """Copy the outcome of ``done`` to ``future``, unless that has one."""
    with suppress(InvalidStateError):
        try:
            future.set_result(done.result())
        except BaseException as error:  # a CancelledError, too
            future.set_exception(error)


def _is_reachable(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with suppress(OSError):
        socket.create_connection((host.strip("[]"), int(port)), HEAD_INTERVAL_S).close()
        return True
    return False
