"""The thread that leases rows to workers and puts finished batches in order, while the consumer trains."""

from __future__ import annotations

import selectors
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import monotonic

from ..formats.errors import WorkerDied
from . import failures
from .board import IDLE, Board
from .channels import Bell
from .leases import CREDIT, Leases
from .messages import Answer, pack_lease, unpack_answer
from .processes import Worker, cause_of
from .runs import Failed, Finished, Run
from .slots import SlotRing
from .trace import Trace

FAILED_STARTS = 10  # workers that are killed before they are ready, while no other says anything
PATIENCE = 1.0  # seconds that a worker has to end by itself


class Dispatcher:
    """Owns the workers and the thread that tends them. Others set ``run`` and ring the bell: no locks.

    It knows nothing of the engine that it serves, so that the engine's garbage collection can end it.
    """

    def __init__(
        self,
        start: Callable[[int], Worker],
        leases: Leases,
        ring: SlotRing,
        board: Board,
        *,
        deadline: float | None,
    ) -> None:
        self.bell = Bell()
        self.run = Run(0, stopped=True)
        self.closing = False
        self.ended = False
        self.error: BaseException | None = None
        self.restarts = 0
        self.blocked = 0.0
        self.trace: Trace | None = None
        self._start = start
        self._leases = leases
        self._ring = ring
        self._board = board
        self._deadline = deadline
        self._served = self.run
        self._failed_starts = 0
        self._workers: dict[int, Worker] = {}
        self._thread = threading.Thread(target=self._serve, name="shardprep-dispatcher", daemon=True)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self.bell, selectors.EVENT_READ)

    def launch(self, workers: int) -> None:
        """Start that many workers, or none, and the thread."""
        try:
            for index in range(workers):
                self._enlist(index)
            self._thread.start()
        except BaseException:
            self._end()
            raise

    def close(self) -> None:
        """End the workers and the thread. From any thread, also within a garbage collection in its own."""
        self.closing = True
        self.bell.ring()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(PATIENCE * 5)

    def _serve(self) -> None:
        """The thread's whole life; an error of it is the consumer's to raise."""
        try:
            while not self.closing:
                self._listen()
                self._follow()
                self._lease_out()
                self._deliver()
        except BaseException as error:  # raised again by whoever waits for a batch
            self.error = error
        finally:
            self.ended = True  # before the last look at `run`: who sets a run later sees this
            self.run.stop()
            self._end()

    def _listen(self) -> None:
        timeout = None if self._deadline is None else self._deadline / 4
        blocked, began = self._is_blocked(), monotonic()
        events = self._selector.select(timeout)
        self.blocked += blocked * (monotonic() - began)
        for key, _ in events:
            if key.fileobj is self.bell:
                self.bell.silence()
            else:
                self._hear(key.data)
        self._kill_overdue()
        while self._ring.returned:
            self._leases.release(self._ring.returned.popleft())

    def _is_blocked(self) -> bool:
        return bool(self._served.plans) and not self._leases.has_lease and not self._leases.has_slot

    def _hear(self, worker: Worker) -> None:
        for message in worker.channel.arrived():
            self._note(worker, *unpack_answer(message))
        if worker.channel.ended:
            self._replace(worker)

    def _note(self, worker: Worker, answer: Answer, lease_id: int, row: int, rest: memoryview) -> None:
        self._failed_starts = 0
        if answer is Answer.READY:
            worker.ready = True
        elif answer is Answer.DONE:
            if (trace := self.trace) is not None:
                trace.finished(worker.index, lease_id)
            self._leases.finish(worker.index, lease_id, rest)
        elif worker.ready:
            self._leases.fail(worker.index, lease_id, row, bytes(rest))
        else:
            raise failures.unpack(bytes(rest), "when it opened the work")

    def _replace(self, worker: Worker) -> None:
        code = self._retire(worker, PATIENCE)
        if not worker.ready:
            self._count_failed_start(code)
        cause = cause_of(code)
        if worker.overdue:
            cause = f"{cause}, for it had made no progress in {self._deadline} s"
        self._leases.lose(worker.index, *self._board.place(worker.index), cause)
        self.restarts += 1
        self._enlist(worker.index)

    def _retire(self, worker: Worker, patience: float) -> int | None:
        self._selector.unregister(worker.channel)
        del self._workers[worker.index]
        return worker.end(patience)

    def _count_failed_start(self, code: int | None) -> None:
        """Who exits by itself before being ready would do so again; who was killed, perhaps not."""
        self._failed_starts += 1
        if self._failed_starts >= FAILED_STARTS or (code is not None and code >= 0):
            raise WorkerDied(f"a worker ended before it was ready, by {cause_of(code)}; {_HINT}")

    def _enlist(self, index: int) -> None:
        self._board.lease[index] = IDLE
        worker = self._start(index)
        self._workers[index] = worker
        self._selector.register(worker.channel, selectors.EVENT_READ, worker)

    def _kill_overdue(self) -> None:
        if self._deadline is None:
            return
        now = monotonic()
        for worker in self._workers.values():
            place = self._board.place(worker.index)
            if place != worker.place or not self._leases.held(worker.index):
                worker.place, worker.since = place, now
            elif now - worker.since > self._deadline and not worker.overdue:
                worker.overdue = True
                worker.process.kill()

    def _follow(self) -> None:
        """Turn to the run that the consumer wants; one that was stopped leaves nothing to do."""
        run = self.run
        if run is not self._served:
            self._served.clear()
            self._served = run
        number = 0 if run.stopped else run.number
        if number != self._leases.run:
            self._leases.begin(number)
            self._board.run[:] = number
            if run.stopped:
                run.clear()

    def _lease_out(self) -> None:
        """One lease to everybody, also who is only starting, before a second one to anybody."""
        all_ready = all(worker.ready for worker in self._workers.values())
        for held in range(CREDIT if all_ready else 1):
            for worker in self._workers.values():
                if worker.ready and self._leases.held(worker.index) == held:
                    self._lease_to(worker)

    def _lease_to(self, worker: Worker) -> None:
        plans = self._served.plans
        while self._leases.run and self._leases.wants_batch and self._leases.has_slot and plans:
            plan = plans.popleft()
            self._ring.load(self._leases.open(plan.items, plan.written), plan.cargo)
        if lease := self._leases.take(worker.index):
            if (trace := self.trace) is not None:
                trace.leased(worker.index, lease)
            with suppress(OSError):  # it has ended, which its channel tells next
                worker.channel.send(*pack_lease(lease))

    def _deliver(self) -> None:
        while batch := self._leases.deliver():
            if batch.failure:
                self._leases.release(batch.slot)
                self._served.results.put(Failed(batch, batch.failure))
            else:
                memory = self._ring.lend(batch.slot, self.bell.ring)
                self._served.results.put(Finished(batch, memory))
            if (trace := self.trace) is not None:
                trace.delivered(self._served.results.qsize())

    def _end(self) -> None:
        """Wait a little for the workers to end by themselves, then kill."""
        self._board.run[:] = 0
        for worker in self._workers.values():
            worker.channel.finish()
            if not worker.ready:
                worker.process.kill()
        give_up = monotonic() + PATIENCE
        while self._workers and (left := give_up - monotonic()) > 0:
            for key, _ in self._selector.select(left):
                self._hear_out(key)
        for worker in list(self._workers.values()):
            self._retire(worker, 0)
        self._selector.close()
        self._ring.close()
        self._board.close()

    def _hear_out(self, key: selectors.SelectorKey) -> None:
        """Read on, for a worker whose answers nobody reads cannot end."""
        if key.fileobj is self.bell:
            self.bell.silence()
            return
        deque(key.data.channel.arrived(), maxlen=0)
        if key.data.channel.ended:
            self._retire(key.data, PATIENCE)


_HINT = (
    "see what they wrote to stderr. If the work is defined in the main script, everything else in there "
    'belongs under `if __name__ == "__main__":`'
)
