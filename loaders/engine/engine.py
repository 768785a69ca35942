"""Batches from several processes: each row once, in shared memory, in order, even if workers die."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing.util import Finalize
from time import perf_counter
from types import TracebackType
from typing import Any, Self

from shardprep.formats.errors import OperationError, UsageError
from shardprep.formats.printable import printable
from shardprep.formats.system.owned import Owned
from shardprep.loaders.buffers.slots import SlotLayout, SlotRing
from shardprep.loaders.engine.protocol.batch import EngineBatch, fill_batch
from shardprep.loaders.engine.protocol.leases import LeasedBatch, Leases, RowFailure
from shardprep.loaders.engine.protocol.messages import MAX_LEASE_BYTES
from shardprep.loaders.engine.protocol.status_table import CpuClock, StatusTable
from shardprep.loaders.engine.protocol.task import Fill, RowTask

from .checks import check_engine
from .course import Course
from .crashes import CrashPolicy
from .dispatcher import Dispatcher
from .protocol import worker_errors
from .run import BatchPlans, BatchRequest, EngineRun, Failed, Plan
from .sent_work import SentWork
from .stats import EngineStats, Meter
from .trace import KEEP, BatchTaken, Trace
from .worker_process import start


def _number(item: Any) -> str:
    return f"item {item}"


class Engine(Owned):
    """Workers that fill batches of ``work``, of the form ``layout``, in shared slots.

    ``workers`` processes fill ``slots`` slots; with 0 workers the calling thread fills batches. A lease has
    at most ``chunk`` rows. ``deadline`` is how many seconds one row may take before its worker is killed;
    None is no limit. Set it well above the slowest row if work can hang. ``start_timeout`` is how many
    seconds a worker may take to open the work; None is 120, or, with a deadline, that but at least 30. Unless
    ``ordered``, batches come as they are finished. ``describe`` names an item in errors. ``crashes``
    says whether a row that crashes its workers is an error. ``owner`` is the object that errors name. Raises
    OperationError when there is too little memory, or no room for a process or thread; UsageError when the
    work cannot be pickled. The first batch raises what opening the work raises.

    After a close, when the engine is dropped, or when this process ends or is killed, no process, file or
    memory is left. One thread at a time may run it, any thread may close it; a forked copy does nothing.
    """

    def __init__(
        self,
        work: RowTask,
        layout: SlotLayout,
        *,
        workers: int,
        slots: int = 8,
        chunk: int = 32,
        deadline: float | None = None,
        start_timeout: float | None = None,
        ordered: bool = True,
        describe: Callable[[Any], str] = _number,
        crashes: CrashPolicy = CrashPolicy(),  # noqa: B008 - it is frozen
        owner: str = "engine",
    ) -> None:
        check_engine(work, workers=workers, slots=slots, chunk=chunk, deadline=deadline)
        self._work = work
        self._layout = layout
        self._slots = slots
        self._describe = describe
        self._crashes = crashes
        self._owner = owner
        self._numbers = itertools.count(1)
        self.meter = Meter()
        self.course = Course()
        self._closed = False
        self._status_table = StatusTable(max(1, workers), len(work.stages))
        self._sent: SentWork | None = None
        self._ring: SlotRing | None = None
        self._dispatcher: Dispatcher | None = None
        self._trace: Trace | None = None
        if workers:
            leases = Leases(
                slots=slots,
                workers=workers,
                chunk=min(chunk, MAX_LEASE_BYTES // max(1, work.item_dtype.itemsize)),
                ordered=ordered,
                reason_to_skip=crashes.reason_to_skip,
            )
            self._launch(leases, workers, deadline=deadline, start_timeout=start_timeout)

    def _launch(
        self, leases: Leases, workers: int, *, deadline: float | None, start_timeout: float | None
    ) -> None:
        sent = self._sent = SentWork(self._work)
        ring = SlotRing(self._layout, self._slots)
        begin = partial(start, ring=ring, status_table=self._status_table, work=sent)
        dispatcher = Dispatcher(
            begin, leases, ring, self._status_table, deadline=deadline, start_timeout=start_timeout
        )
        # multiprocessing's Finalize, because it runs before multiprocessing terminates its remaining children
        Finalize(self, dispatcher.close, exitpriority=10)
        dispatcher.launch(workers)
        self._ring, self._dispatcher = ring, dispatcher

    def run(self, plans: Iterable[Plan]) -> Iterator[EngineBatch]:
        """Yield one batch per plan (an array of items, at most a slot's rows), in the plans' order.

        Plans are drawn in the caller's thread, up to ``slots`` of them before their batches can be begun. A
        :class:`.run.BatchRequest` has inputs beside its items; the slots' input area must be large enough.
        Raises what the work raised for a row, with its traceback and the row's description as a note, once
        the batches before it are delivered; WorkerDied where three workers ended at a row; what the plans
        raise. Another run may follow; it ends an unfinished one, which raises UsageError.
        """
        drawn = BatchPlans(plans, dtype=self._work.item_dtype, rows=self._layout.rows)
        self.refuse_closed()
        self._refuse_copy()
        if self._dispatcher is None or self._ring is None:
            yield from self._run_here(drawn)
        else:
            yield from self._run_there(drawn, self._dispatcher, self._ring)

    def refuse_closed(self) -> None:
        """Raise UsageError after :meth:`close`."""
        if self._closed:
            raise UsageError(f"this {self._owner} is closed; make a new one")

    def _run_here(self, plans: BatchPlans) -> Iterator[EngineBatch]:
        run = next(self._numbers)
        with self.meter.run(), self._work.open(self._status_table.clock[0]) as fill:
            for number in itertools.count():
                drawn = tuple(plans.draw(1))
                if not plans.claim():
                    return
                yield self._filled_here(fill, run, number, *drawn)

    def _filled_here(self, fill: Fill, run: int, number: int, request: BatchRequest) -> EngineBatch:
        items = request.items
        began, cpu = perf_counter(), CpuClock()
        before = cpu.read()
        batch = fill_batch(fill, number, items, layout=self._layout, where=self._where)
        request.filled()
        took = perf_counter() - began
        self._status_table.filling[0] += took
        self._status_table.cpu[0] += cpu.read() - before
        self.meter.waited(took)
        self.meter.handed(len(items), 0.0)
        self.course.add(len(items), ready=0, waited=took)
        if (trace := self._trace) is not None:
            trace.filled_here(run, number, len(items), began)
        return batch

    def _run_there(self, plans: BatchPlans, dispatcher: Dispatcher, ring: SlotRing) -> Iterator[EngineBatch]:
        run = self._begin(dispatcher)
        try:
            with self.meter.run():
                while self._top_up(run, plans, dispatcher):
                    yield self._receive(run, dispatcher, ring)
        finally:
            run.stop()
            dispatcher.bell.ring()

    def _begin(self, dispatcher: Dispatcher) -> EngineRun:
        dispatcher.run.stop()
        run = dispatcher.run = EngineRun(next(self._numbers))
        if dispatcher.ended:  # perhaps before it saw this run
            run.stop()
        return run

    def _refuse_copy(self) -> None:
        """Raise UsageError in a forked copy: the parent's workers go on changing the slots."""
        if not self.made_here:
            raise UsageError(f"this {self._owner} belongs to the process that forked this one; make another")

    def _top_up(self, run: EngineRun, plans: BatchPlans, dispatcher: Dispatcher) -> bool:
        """Draw plans, pass each on at once, and stop drawing when a batch is ready."""
        self._refuse_copy()
        for drawn in plans.draw(self._slots - len(run.plans)):
            run.plans.append(drawn)
            dispatcher.bell.ring()
            if not run.results.empty():
                break
        return plans.claim()

    def _receive(self, run: EngineRun, dispatcher: Dispatcher, ring: SlotRing) -> EngineBatch:
        began = perf_counter()
        result = run.results.get()
        got = perf_counter()
        if result is None:
            raise self._why_ended(dispatcher)
        leased = result.batch
        if isinstance(result, Failed):
            raise self._error_of(leased, result.failure)
        self.meter.waited(got - began)
        batch = EngineBatch.assemble(
            leased.number,
            leased.items,
            layout=self._layout,
            memory=result.memory,
            lease_outcomes=leased.outcomes,
            written=leased.written,
            copied=not ring.may_keep(leased.slot),
        )
        ended = perf_counter()
        self.meter.handed(len(leased.items), ended - got)
        self.course.add(len(leased.items), ready=run.results.qsize(), waited=got - began)
        if (trace := self._trace) is not None:
            reception = BatchTaken(run.number, leased.number, len(leased.items), began, got, ended)
            trace.received(reception, run.results.qsize())
        return batch

    def _why_ended(self, dispatcher: Dispatcher) -> BaseException:
        if dispatcher.error:
            return dispatcher.error
        if dispatcher.ended:
            return OperationError(f"the {self._owner} was closed while it ran")
        return UsageError(f"another iteration of this {self._owner} has begun; end one first, or make two")

    def _error_of(self, leased: LeasedBatch, failure: RowFailure) -> BaseException:
        item = leased.items[failure.row]
        where = self._where(failure.row, leased.number, item)
        if failure.error:
            return worker_errors.unpack(failure.error, where)
        return self._crashes.error(failure.cause, where=where, key=self._describe(item))

    def _where(self, row: int, number: int, item: Any) -> str:
        return f"at row {row} of batch {number}: {printable(self._describe(item))}"

    def stats(self) -> EngineStats:
        """Return what was counted until now. Thread-safe."""
        stages, copied = self._work.stages, self._ring.copied if self._ring else 0
        return self.meter.read(self._status_table, stages, dispatcher=self._dispatcher, copied=copied)

    @property
    def ready(self) -> int:
        """Number of finished batches that wait for the consumer; 0 without workers. Thread-safe."""
        return self._dispatcher.run.results.qsize() if self._dispatcher else 0

    @property
    def slots(self) -> int:
        """Number of batches that fit the shared memory; 0 without workers."""
        return self._slots if self._dispatcher else 0

    @property
    def layout(self) -> SlotLayout:
        """The form of a batch."""
        return self._layout

    @property
    def most_held(self) -> int:
        """Number of batches that may be held before further ones are copied."""
        return self._ring.most_held if self._ring else sys.maxsize

    @property
    def shared_bytes(self) -> int:
        """Bytes of memory shared with the workers, of sparse slots what was written; 0 without workers."""
        return self._ring.nbytes if self._ring else 0

    def record(self, *, keep: int = KEEP) -> Trace:
        """Begin a new trace, of what happens until :meth:`stop_recording`."""
        trace = Trace(self._status_table.clock, self._work.stages, keep=keep)
        self._set_trace(trace)
        return trace

    def stop_recording(self, trace: Trace) -> None:
        """End the trace, unless another one was begun since."""
        if self._trace is trace:
            self._set_trace(None)

    def _set_trace(self, trace: Trace | None) -> None:
        self._trace = trace
        if self._dispatcher:
            self._dispatcher.trace = trace

    def close(self) -> None:
        """End the workers: wait a second for them to end, then kill them. Batches stay valid. Idempotent."""
        if self.made_here:
            self._closed = True
            if self._dispatcher:
                self._dispatcher.close()
            if self._sent:
                self._sent.close()
            self._status_table.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
