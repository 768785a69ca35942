"""The thread that leases rows to workers and puts finished batches in order, while the consumer trains."""

from __future__ import annotations

import selectors
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import monotonic

from shardprep.formats.processes.spawned import POLL_INTERVAL_S
from shardprep.formats.processes.thread_start import starting_thread
from shardprep.formats.system.owned import Owned
from shardprep.loaders.buffers.slots import SlotRing
from shardprep.loaders.engine.protocol.bell import Bell
from shardprep.loaders.engine.protocol.leases import LEASES_PER_WORKER, Leases
from shardprep.loaders.engine.protocol.messages import Answer, pack_lease, unpack_answer
from shardprep.loaders.engine.protocol.status_table import IDLE, StatusTable

from .protocol import worker_errors
from .run import EngineRun, Failed, FinishedBatch
from .starts import Starts
from .trace import Trace
from .worker_process import Worker, cause_of

WORKER_EXIT_TIMEOUT_S = 1.0  # for a worker to end by itself, before it is killed


class Dispatcher(Owned):
    """Owner of the workers and of the thread that serves them.

    Other threads set ``run`` and ring the bell; there are no locks. It has no reference to its engine, so
    that the engine's garbage collection can end it.
    """

    def __init__(
        self,
        start: Callable[[int, Callable[[], bool]], Worker],
        leases: Leases,
        ring: SlotRing,
        status_table: StatusTable,
        *,
        deadline: float | None,
        start_timeout: float | None = None,
    ) -> None:
        self.bell = Bell()
        self.run = EngineRun(0, stopped=True)
        self.closing = False
        self.ended = False
        self.error: BaseException | None = None
        self.restarts = 0
        self.blocked = 0.0
        self.trace: Trace | None = None
        self._start = start
        self._leases = leases
        self._ring = ring
        self._status_table = status_table
        self._deadline = deadline
        self._served = self.run
        self._starts = Starts(timeout=start_timeout, deadline=deadline)
        self._workers: dict[int, Worker] = {}
        self._must_poll = False
        self._thread = threading.Thread(target=self._serve, name="shardprep-dispatcher", daemon=True)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self.bell, selectors.EVENT_READ)

    def launch(self, workers: int) -> None:
        """Start that many workers and the thread; on an error, no worker is left."""
        try:
            for index in range(workers):
                self._start_worker(index)
            with starting_thread():
                self._thread.start()
        except BaseException:
            self._end()
            raise

    def close(self) -> None:
        """End the workers and the thread. May be called in any thread, also in a garbage collection."""
        self.closing = True
        self.bell.ring()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(WORKER_EXIT_TIMEOUT_S * 5)

    def _serve(self) -> None:
        """Run the thread; its error is raised in the consumer's thread."""
        try:
            while not self.closing:
                self._receive_events()
                self._switch_run()
                self._give_leases()
                self._deliver()
        except BaseException as error:  # raised again in the thread that waits for a batch
            if not self.closing:
                self.error = error
        finally:
            self.ended = True  # before the last read of `run`: a thread that sets `run` later sees this
            self.run.stop()
            self._end()

    def _receive_events(self) -> None:
        blocked, began = self._is_blocked(), monotonic()
        events = self._selector.select(self._longest_wait(began) if self._must_poll else None)
        self.blocked += blocked * (monotonic() - began)
        for key, _ in events:
            if key.fileobj is self.bell:
                self.bell.silence()
            else:
                self._receive_from(key.data, has_exited=key.fileobj is key.data.process)
        if self._must_poll:
            self._poll_workers()
        while self._ring.returned:
            self._leases.release(self._ring.returned.popleft())

    def _longest_wait(self, now: float) -> float | None:
        """Seconds until the workers must be checked; None where waiting for their messages is enough."""
        waits = [] if self._deadline is None else [self._deadline / 4]
        for worker in self._workers.values():
            if worker.process.fileno() < 0:
                waits.append(POLL_INTERVAL_S)
            if not worker.ready and not worker.overdue:
                waits.append(max(0.0, worker.since + self._starts.timeout - now))
        return min(waits, default=None)

    def _is_blocked(self) -> bool:
        return bool(self._served.plans) and not self._leases.has_lease and not self._leases.has_slot

    def _receive_from(self, worker: Worker, *, has_exited: bool) -> None:
        """Handle a worker's messages, also the last ones of a worker that has exited.

        Its channel may outlive it.
        """
        if self._workers.get(worker.index) is not worker:  # it was replaced
            return
        for message in worker.channel.arrived():
            self._handle(worker, *unpack_answer(message))
        if has_exited or worker.channel.ended:
            self._replace(worker)

    def _handle(self, worker: Worker, answer: Answer, lease_id: int, row: int, rest: memoryview) -> None:
        self._starts.answered()
        if answer is Answer.READY:
            worker.ready = True
            self._starts.succeeded(worker.index)
            self._must_poll = self._needs_polling()
        elif answer is Answer.DONE:
            if (trace := self.trace) is not None:
                trace.finished(worker.index, lease_id)
            self._leases.finish(worker.index, lease_id, rest)
        elif worker.ready:
            self._leases.fail(worker.index, lease_id, row, bytes(rest))
        else:
            raise worker_errors.unpack(bytes(rest), "while opening the work")

    def _replace(self, worker: Worker) -> None:
        code = self._end_worker(worker, WORKER_EXIT_TIMEOUT_S)
        if not worker.ready:
            self._starts.failed(worker.index, code, overdue=worker.overdue)
        cause = cause_of(code)
        if worker.overdue:
            cause = f"{cause}, because it made no progress for {self._deadline} s"
        self._leases.lose(worker.index, *self._status_table.place(worker.index), cause)
        self.restarts += 1
        self._start_worker(worker.index)

    def _end_worker(self, worker: Worker, timeout_s: float) -> int | None:
        self._selector.unregister(worker.channel)
        if worker.process.fileno() >= 0:
            self._selector.unregister(worker.process)
        del self._workers[worker.index]
        return worker.process.end(timeout_s)

    def _start_worker(self, index: int) -> None:
        self._status_table.lease[index] = IDLE
        worker = self._start(index, lambda: not self.closing)
        self._workers[index] = worker
        self._selector.register(worker.channel, selectors.EVENT_READ, worker)
        if worker.process.fileno() >= 0:
            self._selector.register(worker.process, selectors.EVENT_READ, worker)
        self._must_poll = True

    def _needs_polling(self) -> bool:
        """Whether any worker can time out, or has no descriptor that reports its exit."""
        workers = self._workers.values()
        return self._deadline is not None or any(not w.ready or w.process.fileno() < 0 for w in workers)

    def _poll_workers(self) -> None:
        """Kill the workers that have timed out, and poll those without a descriptor for their exit."""
        for worker in list(self._workers.values()):
            if worker.ready and self._deadline is not None:
                self._kill_if_overdue(worker, self._deadline)
            elif not worker.ready:
                self._kill_if_overdue(worker, self._starts.timeout)
            if worker.process.fileno() < 0 and worker.process.has_exited():
                self._receive_from(worker, has_exited=True)

    def _kill_if_overdue(self, worker: Worker, limit: float) -> None:
        now, place = monotonic(), self._status_table.place(worker.index)
        if worker.ready and (place != worker.place or not self._leases.held(worker.index)):
            worker.place, worker.since = place, now
        elif now - worker.since >= limit and not worker.overdue:
            worker.overdue = True
            worker.process.kill()

    def _switch_run(self) -> None:
        """Switch to the consumer's current run; a run that was stopped has no work."""
        run = self.run
        if run is not self._served:
            self._served.clear()
            self._served = run
        number = 0 if run.stopped else run.number
        if number != self._leases.run:
            self._leases.begin(number)
            self._status_table.run[:] = number
            if run.stopped:
                run.clear()

    def _give_leases(self) -> None:
        """Give each worker one lease, also those that are starting, before any worker gets a second one."""
        all_ready = all(worker.ready for worker in self._workers.values())
        for held in range(LEASES_PER_WORKER if all_ready else 1):
            for worker in self._workers.values():
                if worker.ready and self._leases.held(worker.index) == held:
                    self._lease_to(worker)

    def _lease_to(self, worker: Worker) -> None:
        plans = self._served.plans
        while self._leases.run and self._leases.wants_batch and self._leases.has_slot and plans:
            plan = plans.popleft()
            self._ring.load(self._leases.open(plan.items, plan.written, plan.filled), plan.inputs)
        if lease := self._leases.take(worker.index):
            if (trace := self.trace) is not None:
                trace.leased(worker.index, lease)
            with suppress(OSError):  # the worker has ended; its channel reports that next
                worker.channel.send(*pack_lease(lease))

    def _deliver(self) -> None:
        while batch := self._leases.deliver():
            if batch.filled:
                batch.filled()
            if batch.failure:
                self._leases.release(batch.slot)
                self._served.results.put(Failed(batch, batch.failure))
            else:
                memory = self._ring.lend(batch.slot, self.bell.ring)
                self._served.results.put(FinishedBatch(batch, memory))
            if (trace := self.trace) is not None:
                trace.delivered(self._served.results.qsize())

    def _end(self) -> None:
        """Wait WORKER_EXIT_TIMEOUT_S for the workers to end by themselves, then kill them."""
        self._status_table.run[:] = 0
        for worker in self._workers.values():
            worker.channel.finish()
            if not worker.ready:
                worker.process.kill()
        deadline = monotonic() + WORKER_EXIT_TIMEOUT_S
        while self._workers and (left := deadline - monotonic()) > 0:
            for key, _ in self._selector.select(left):
                self._drain(key)
        for worker in list(self._workers.values()):
            self._end_worker(worker, 0)
        self._selector.close()
        self._ring.close()
        self._status_table.close()

    def _drain(self, key: selectors.SelectorKey) -> None:
        """Read and drop messages: a worker cannot end while its answers are not read."""
        if key.fileobj is self.bell:
            self.bell.silence()
            return
        worker: Worker = key.data
        if self._workers.get(worker.index) is worker:
            deque(worker.channel.arrived(), maxlen=0)
            if worker.channel.ended or key.fileobj is worker.process:
                self._end_worker(worker, WORKER_EXIT_TIMEOUT_S)
