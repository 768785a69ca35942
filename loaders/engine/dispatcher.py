"""The thread that leases rows to workers, orders finished batches, and replaces dead workers."""

from __future__ import annotations

import os
import selectors
import signal
import threading
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.spawn import get_executable
from multiprocessing.util import Finalize
from operator import methodcaller
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, Self

import numpy as np

from shardprep.formats.errors import WorkerDied, printable
from shardprep.formats.runtime.owners import Descriptor
from shardprep.formats.runtime.processes import (
    START_TIMEOUT_S,
    SpawnedProcess,
    is_starting_process,
    not_ready_error,
)
from shardprep.loaders.batches.pickling import Memory, PickledValue
from shardprep.loaders.batches.slots import RowForm, SlotRing
from shardprep.loaders.engine.leases import (
    LEASES_PER_WORKER,
    Answer,
    LeasedBatch,
    Leases,
    pack_lease,
    unpack_answer,
)
from shardprep.loaders.engine.messages import Items, ResultRows, RowTask, StatusTable, unpack_error
from shardprep.loaders.engine.trace import Trace
from shardprep.loaders.engine.worker import run_worker, share_work


@dataclass
class Worker:
    """A worker process: ``ready`` once its work is open, ``overdue`` once killed by a time-out.

    ``place`` is its lease and row, unchanged since ``since`` (``monotonic``); ``reported`` once a warning has
    named it.
    """

    index: int
    process: SpawnedProcess
    ready: bool = False
    overdue: bool = False
    reported: bool = False
    place: tuple[int, int] = (0, 0)
    since: float = field(default_factory=monotonic)


def describe_exit(code: int | None) -> str:
    """Describe an exit code: "SIGSEGV", "exit code 1"."""
    if code is None:
        return "something unknown"
    if code == 255:  # so multiprocessing's child ends if it cannot run Python
        return f"exit code 255, perhaps because {os.fsdecode(get_executable())} could not be run"
    if code >= 0:
        return f"exit code {code}"
    names = {int(number): number.name for number in signal.Signals}
    return names.get(-code, f"signal {-code}")


MIN_START_TIMEOUT_S = 30.0  # the deadline is for one row, but starting also imports libraries
MAX_FAILED_STARTS = 10  # consecutive kills before a worker is ready; a time-out counts for half of them
POLL_INTERVAL_S = 0.2  # between two checks of the workers' progress
SLOW_ROW_S = 60.0  # a row that takes longer is named in a warning


class _Watch(weakref.ref[Any]):
    """A reference that rings a bell when its object is dropped, unless the reference is dropped first."""

    __slots__ = ("bell", "ring")
    bell: Bell
    ring: Callable[[int], None]


class Bell(Descriptor):
    """An eventfd that wakes a thread waiting in a selector.

    Ringing takes no lock, never blocks, and does nothing in a forked process, so any thread may ring, even
    during garbage collection. Everyone who may ring keeps it open, so that no ring reaches a reused
    descriptor.
    """

    def __init__(self) -> None:
        super().__init__(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))

    def ring(self) -> None:
        """Wake the thread, now or when it next waits."""
        if self.was_made_here:  # a daemon may have closed all descriptors and reused this one
            with suppress(OSError, ValueError):  # it was finalized in the same garbage collection
                os.eventfd_write(self.fileno(), 1)

    def watch(self, target: Any) -> weakref.ref[Any]:
        """Return a reference that rings once its target is dropped, unless the reference is dropped first.

        It runs no Python code then, in which an interruption would be lost: weak references ignore errors.
        """
        reference = _Watch(target, methodcaller("ring", 1))
        reference.bell = self  # keeps the descriptor open
        reference.ring = partial(os.eventfd_write, self.fileno())
        return reference

    def silence(self) -> None:
        """Let the thread wait again, once it was woken."""
        os.eventfd_read(self.fileno())


class SlowRecord(UserWarning):
    """A worker has spent more than a minute on one record."""


@dataclass(frozen=True, eq=False)
class BatchRequest:
    """The items of a batch, and its ``inputs``: values to write to the slot's input area, by offset.

    ``result_rows`` are rows in the input area that the workers write instead of the layout's fields.
    ``on_filled`` is called in any thread once the workers are done with the batch, unless its run ends first.
    """

    items: Items
    inputs: tuple[tuple[int, PickledValue], ...] = ()
    result_rows: ResultRows | None = None
    on_filled: Callable[[], object] | None = None

    def with_rows(self, form: RowForm | None, *, at: int, room: int) -> Self:
        """Return the request with rows for results of a form, described in the items' ROW_COLUMNS.

        They start at ``at`` in an input area of ``room`` bytes. Returns the request unchanged without a form
        or items, or if the rows do not fit.
        """
        if form is None or not len(self.items):
            return self
        piece, items = PickledValue.of(form), self.items
        rows = ResultRows(form, len(items), at, piece.size)
        if rows.end > room:
            return self
        items["row"], items["rows"] = range(len(items)), len(items)
        items["form_at"], items["form_size"] = at, piece.size
        return replace(self, inputs=(*self.inputs, (at, piece)), result_rows=rows)


Plan = Items | BatchRequest | Callable[[], object]
"""A function takes the place of a plan that is not ready; it returns once the plan is ready, or raises."""


@dataclass(eq=False)
class EngineRun:
    """The lock-free queues of a run: plans to the dispatcher, results to the consumer, in order.

    A result is a batch with its memory, whose slot becomes free when that is dropped; a failed batch has no
    memory. None means that no more results follow: the run was stopped, or the dispatcher has ended.
    """

    number: int
    plans: deque[BatchRequest] = field(default_factory=deque)
    results: SimpleQueue[tuple[LeasedBatch, Memory] | None] = field(default_factory=SimpleQueue)
    stopped: bool = False
    paused: bool = False  # between two epochs, when no batch is asked for
    first: int = 0  # number of the first batch of this epoch
    due: int = 0  # number of the next batch

    def stop(self) -> None:
        self.stopped = True
        self.results.put(None)

    def clear(self) -> None:
        """Release the plans and the results that were not taken."""
        self.plans.clear()
        with suppress(Empty):
            while True:
                self.results.get_nowait()
        self.results.put(None)


WORKER_EXIT_TIMEOUT_S = 1.0  # for a worker to end by itself, before it is killed


class Dispatcher:
    """Owns the workers and the thread that serves them, which end when ``owner`` is collected.

    Other threads set ``run`` and ring the bell; there are no locks. It does not refer to its engine, so that
    collecting the engine can end it. A worker imports the main module only if the work refers to it: a
    training script would load its framework, and run again without ``if __name__ == "__main__"``.
    """

    def __init__(
        self,
        work: RowTask,
        leases: Leases,
        ring: SlotRing,
        status_table: StatusTable,
        *,
        workers: int,
        deadline: float | None,
        locate: Callable[[Any], str],
        owner: object,
    ) -> None:
        self.bell = Bell()
        self.run = EngineRun(0, stopped=True)
        self.closing = False
        self.ended = False
        self.error: BaseException | None = None
        self.restarts = 0
        self.blocked = 0.0
        self.trace: Trace | None = None
        self._work, self._main = share_work(work)
        self._leases = leases
        self.ring = ring
        self._status_table = status_table
        self._deadline = deadline
        self._locate = locate
        self._served_run = self.run
        self._start_timeout = START_TIMEOUT_S if deadline is None else max(deadline, MIN_START_TIMEOUT_S)
        self._failed_starts: Counter[int] = Counter()  # by worker, since it was last ready
        self._workers: dict[int, Worker] = {}
        self._count = workers
        self._next_check = monotonic()
        self._thread = threading.Thread(target=self._serve, name="shardprep-dispatcher", daemon=True)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self.bell, selectors.EVENT_READ)
        # multiprocessing's Finalize runs before multiprocessing ends its remaining children
        self._finalizer = Finalize(owner, self.close, exitpriority=10)
        try:
            self._thread.start()
            self.run.results.get()  # once the workers are started, or the thread has ended
            if self.error:
                raise self.error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the workers and the thread. May be called in any thread, even during garbage collection."""
        self.closing = True
        self.bell.ring()
        if is_starting_process():  # a garbage collection calls this, and the thread waits for that start
            return
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(WORKER_EXIT_TIMEOUT_S * 5)

    def _serve(self) -> None:
        """Body of the thread; its error is raised in the consumer's thread."""
        try:
            while len(self._workers) < self._count and not self.closing:
                self._start_worker(len(self._workers))
            self.run.stop()  # tells the constructor
            while not self.closing:
                self._receive_events()
                self._switch_run()
                self._give_leases()
                self._deliver()
        except BaseException as error:  # raised again in the thread that waits for a batch
            if not self.closing:
                self.error = error
        finally:
            self.ended = True  # before the last use of `run`: a thread that sets `run` later sees this
            self.run.stop()
            self._end_workers()

    def _receive_events(self) -> None:
        began = monotonic()
        waits = bool(self._served_run.plans) and not self._served_run.paused
        blocked = waits and not self._leases.has_lease and not self._leases.has_slot
        interval = min(POLL_INTERVAL_S, self._deadline / 4) if self._deadline else POLL_INTERVAL_S
        events = self._selector.select(interval)
        self.blocked += blocked * (monotonic() - began)
        for key, _ in events:
            if key.fileobj is self.bell:
                self.bell.silence()
            else:
                self._receive_from(key.data, has_exited=key.fileobj is key.data.process)
        if (late := monotonic() - self._next_check) >= 0:
            self._next_check += late + interval
            for worker in self._workers.values():
                worker.since += max(0.0, late - interval)  # all processes may have been stopped, as by Ctrl-Z
                self._check_progress(worker)
        for slot in self.ring.collect_returned():
            self._leases.release(slot)

    def _receive_from(self, worker: Worker, *, has_exited: bool) -> None:
        """Handle a worker's messages, including the last ones after it has exited."""
        if self._workers.get(worker.index) is not worker:  # it was replaced
            return
        for message in worker.process.channel.messages():
            self._handle(worker, *unpack_answer(message))
        if has_exited or worker.process.channel.ended:
            self._replace(worker)

    def _handle(self, worker: Worker, answer: Answer, lease_id: int, row: int, rest: memoryview) -> None:
        if answer is Answer.READY:
            worker.ready, worker.since = True, monotonic()
            del self._failed_starts[worker.index]
        elif answer is Answer.DONE:
            lease = self._leases.finish(worker.index, lease_id, rest)
            if (trace := self.trace) is not None:
                trace.record_finished(worker.index, lease)
        elif worker.ready:
            self._leases.fail(worker.index, lease_id, row, bytes(rest))
        else:
            raise unpack_error(bytes(rest), "while opening the work")

    def _replace(self, worker: Worker) -> None:
        code = self._end_worker(worker, WORKER_EXIT_TIMEOUT_S)
        if not worker.ready:
            self._refuse_failed_start(worker, code)
        cause = describe_exit(code)
        if worker.overdue:
            cause = f"{cause}, because it made no progress for {self._deadline} s"
        self._leases.lose(worker.index, *self._status_table.place(worker.index), cause)
        self.restarts += 1
        self._start_worker(worker.index)

    def _refuse_failed_start(self, worker: Worker, code: int | None) -> None:
        """Raise WorkerDied if the next start would fail, too: after an exit or repeated kills."""
        self._failed_starts[worker.index] += MAX_FAILED_STARTS // 2 if worker.overdue else 1
        is_last = self._failed_starts[worker.index] >= MAX_FAILED_STARTS
        if worker.overdue and is_last:
            error = not_ready_error(self._start_timeout)
            error.message += ". If opening the work takes longer, set `deadline` to the seconds it needs"
            raise error
        if is_last or (code is not None and code >= 0 and not worker.overdue):
            raise WorkerDied(
                f"a worker ended before it was ready, by {describe_exit(code)}; see what the workers wrote to stderr. "
                "If the work is defined in the main script, put everything else in that script under "
                '`if __name__ == "__main__":`'
            )

    def _end_worker(self, worker: Worker, timeout_s: float) -> int | None:
        self._selector.unregister(worker.process.channel)
        self._selector.unregister(worker.process)
        del self._workers[worker.index]
        return worker.process.end(timeout_s)

    def _start_worker(self, index: int) -> None:
        self._status_table.set_idle(index)
        process = SpawnedProcess(
            run_worker,
            name=f"shardprep-worker-{index}",
            main=self._main,
            index=index,
            ring=self.ring,
            status_table=self._status_table,
            work=self._work,
        )
        worker = self._workers[index] = Worker(index, process)
        self._selector.register(worker.process.channel, selectors.EVENT_READ, worker)
        self._selector.register(worker.process, selectors.EVENT_READ, worker)

    def _check_progress(self, worker: Worker) -> None:
        """Kill a worker that has timed out, and warn about a slow row."""
        limit = self._deadline if worker.ready else self._start_timeout
        now, place = monotonic(), self._status_table.place(worker.index)
        if worker.ready and (place != worker.place or not self._leases.held_count(worker.index)):
            worker.place, worker.since, worker.reported = place, now, False
        elif limit is not None and now - worker.since >= limit and not worker.overdue:
            worker.overdue = True
            worker.process.kill()
        elif worker.ready and now - worker.since >= SLOW_ROW_S and not worker.reported:
            worker.reported = True
            if (item := self._leases.item(worker.index, *place)) is not None:
                finding = f"a worker has spent {now - worker.since:.0f} s on {printable(self._locate(item))}"
                advice = "deadline= is the time after which a worker that hangs is replaced"
                warnings.warn(f"{finding}; {advice}", SlowRecord, stacklevel=2)

    def _switch_run(self) -> None:
        """Switch to the consumer's current run; a stopped run has no work."""
        run = self.run
        if run is not self._served_run:
            self._served_run.clear()
            self._served_run = run
        number = 0 if run.stopped else run.number
        if number != self._leases.run:
            self._leases.begin(number)
            self._status_table.run[:] = number
            if run.stopped:
                run.clear()

    def _give_leases(self) -> None:
        """Give each ready worker a lease, and a second one only once all workers are ready."""
        all_ready = all(worker.ready for worker in self._workers.values())
        for count in range(LEASES_PER_WORKER if all_ready else 1):
            for worker in self._workers.values():
                if worker.ready and self._leases.held_count(worker.index) == count:
                    self._lease_to(worker)

    def _lease_to(self, worker: Worker) -> None:
        plans = self._served_run.plans
        while self._leases.run and self._leases.wants_batch and self._leases.has_slot and plans:
            plan = plans.popleft()
            self.ring.load(self._leases.open(plan.items, plan.result_rows, plan.on_filled), plan.inputs)
        if lease := self._leases.take(worker.index):
            if (trace := self.trace) is not None:
                trace.record_sent(lease)
            with suppress(OSError):  # the worker has ended, which its channel will report
                worker.process.channel.send(*pack_lease(lease))

    def _deliver(self) -> None:
        while batch := self._leases.deliver():
            if batch.on_filled:
                batch.on_filled()
            if batch.failure:
                self._leases.release(batch.slot)
                memory = np.empty(0, np.uint8)
            else:
                memory = self.ring.lend(batch.slot, self.bell.watch)
            self._served_run.results.put((batch, memory))
            del memory  # this frame would keep the slot
            if (trace := self.trace) is not None:
                trace.record_delivered(self._served_run.results.qsize())

    def _end_workers(self) -> None:
        """Give the workers WORKER_EXIT_TIMEOUT_S to end by themselves, then kill them."""
        self._status_table.run[:] = 0
        for worker in self._workers.values():
            worker.process.channel.finish()
            if not worker.ready:
                worker.process.kill()
        deadline = monotonic() + WORKER_EXIT_TIMEOUT_S
        for worker in list(self._workers.values()):
            process = worker.process
            while not process.has_exited() and (left := deadline - monotonic()) > 0:
                process.wait_for_news(left)
                deque(process.channel.messages(), maxlen=0)  # it cannot end before its answers are read
            self._end_worker(worker, 0)
        self._selector.close()
        self._work.close()
        self.ring.close()
        self._status_table.close()
        self._finalizer.cancel()  # it refers to this object, whose error can refer to the owner
