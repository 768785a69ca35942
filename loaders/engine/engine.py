"""Batches from several processes: each row once, in shared memory, in order."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from time import perf_counter
from typing import Any, ClassVar, Self, cast

import numpy as np

from shardprep.formats.errors import OperationError, ShardprepError, UsageError, WorkerDied, printable
from shardprep.formats.runtime.owners import Closable, Owner
from shardprep.formats.runtime.processes import CRASHES, refuse_in_main_import
from shardprep.formats.runtime.progress import check_int, check_seconds
from shardprep.loaders.batches.pickling import Memory
from shardprep.loaders.batches.slots import MIN_SLOTS, SlotLayout, SlotRing
from shardprep.loaders.engine.dispatcher import BatchRequest, Dispatcher, EngineRun, Plan
from shardprep.loaders.engine.leases import MAX_LEASE_BYTES, MAX_ROW_FAILURES, LeasedBatch, Leases, RowFailure
from shardprep.loaders.engine.messages import (
    CpuClock,
    EngineBatch,
    Fill,
    RowTask,
    SkippedRow,
    StatusTable,
    fill_batch,
    unpack_error,
)
from shardprep.loaders.engine.trace import BatchWait, Trace


class Counts:
    """Shared base of dataclasses of counts and seconds, which can be added and subtracted.

    Texts, flags, and the fields named in ``CURRENT`` describe a state, and do not add up.
    """

    CURRENT: ClassVar[frozenset[str]] = frozenset()

    def plus(self, other: Self, sign: int = 1) -> Self:
        """Return the sum with counts of the same thing; with ``sign`` -1, the difference."""
        own: Any = self
        names = {f.name for f in fields(own)} - self.CURRENT
        sums = {name: _combine(getattr(self, name), getattr(other, name), sign) for name in names}
        return cast("Self", replace(own, **sums))

    def since(self, before: Self) -> Self:
        """Return the counts since ``before``, earlier stats of the same object."""
        return self.plus(before, -1)


def _combine(value: Any, other: Any, sign: int) -> Any:
    if isinstance(value, Counts) and isinstance(other, Counts):
        return value.plus(other, sign)
    if isinstance(value, dict):
        sums = {name: _combine(value[name], other[name], sign) for name in value if name in other}
        return value | other | sums
    if isinstance(value, tuple):
        return tuple(_combine(a, b, sign) for a, b in zip(value, other, strict=True))
    return value + sign * other if isinstance(value, int | float) and not isinstance(value, bool) else value


@dataclass(frozen=True)
class EngineStats(Counts):
    """Counts and seconds since the engine was made, or since other stats of it (:meth:`since`).

    Attributes:
        rows: Number of rows delivered.
        timed: Number of rows after the very first batch.
        batches: Number of batches delivered.
        elapsed: Seconds of all runs after the first batch.
        warming: Seconds before the first batch, while the workers start.
        starved: Seconds that the consumer waited for later batches.
        handing: Seconds that the consumer's thread spent on handing over batches.
        blocked: Seconds during which the workers had no free slot.
        filling: Each worker's seconds with a lease.
        waiting: Each worker's seconds without a lease.
        cpu: The part of ``filling`` spent on a CPU.
        queued: The part of ``filling`` spent waiting for a CPU.
        stages: Seconds of each timed stage of the work, summed over all workers.
        copied: Number of batches copied because too many were held.
        restarts: Number of replaced workers.
    """

    rows: int
    timed: int
    batches: int
    elapsed: float
    warming: float
    starved: float
    handing: float
    blocked: float
    filling: tuple[float, ...]
    waiting: tuple[float, ...]
    cpu: tuple[float, ...]
    queued: tuple[float, ...]
    stages: dict[str, float]
    copied: int
    restarts: int

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.rows:,} rows in {self.batches:,} batches>"


@dataclass
class Meter:
    """Counters of the consumer's side; one thread at a time uses them."""

    rows: int = 0
    timed: int = 0
    batches: int = 0
    warming: float = 0.0
    starved: float = 0.0
    handing: float = 0.0
    _elapsed: float = 0.0
    _since: float | None = None  # start of the timed part of the current run

    def count(self, batch: BatchWait) -> None:
        waited = batch.got - batch.began
        if self.batches:
            self.timed += batch.rows
            self.starved += waited
        else:
            self.warming += waited
        if self._since is None:
            self._since = batch.began if self.batches else batch.got
        self.batches += 1
        self.rows += batch.rows
        self.handing += batch.ended - batch.got

    @property
    def counts(self) -> dict[str, Any]:
        """The counts and seconds, by their names in the stats."""
        return {name: value for name, value in vars(self).items() if name[0] != "_"} | {
            "elapsed": self.elapsed
        }

    @property
    def waiting(self) -> float:
        """Seconds that the consumer has waited for batches, including the first of each run."""
        return self.warming + self.starved

    def pause(self) -> None:
        """Stop measuring the elapsed time until the next batch."""
        self._elapsed, self._since = self.elapsed, None

    @property
    def elapsed(self) -> float:
        since = self._since
        return self._elapsed if since is None else self._elapsed + perf_counter() - since


MAX_BINS = 240
FIRST_WIDTH_S = 0.25  # of a bin; doubles whenever MAX_BINS are full


@dataclass(frozen=True)
class CoursePoint:
    """A period that began ``began`` seconds after the first batch and lasted ``seconds``.

    The consumer received ``batches`` with ``rows`` rows in total, and waited ``waited`` seconds for them.
    ``ready`` is the mean number of further batches that were ready.
    """

    began: float
    seconds: float
    batches: int
    rows: int
    ready: float
    waited: float


class Course:
    """Counts a consumer's batches in time bins of equal width. One thread adds, any thread may read."""

    def __init__(self) -> None:
        self._began: float | None = None
        # the width, and each bin's sums of batches, rows, ready and waited; replaced together
        self._state = FIRST_WIDTH_S, np.zeros((MAX_BINS, 4))

    def add(self, rows: int, *, ready: int, waited: float) -> None:
        """Count a batch received now."""
        now = perf_counter()
        if self._began is None:
            self._began = now
        width, bins = self._state
        place = int((now - self._began) / width)
        while place >= MAX_BINS:
            pairs = bins.reshape(-1, 2, bins.shape[1]).sum(axis=1)
            width, bins, place = width * 2, np.concatenate([pairs, np.zeros_like(pairs)]), place // 2
            self._state = width, bins
        bins[place] += (1, rows, ready, waited)

    def points(self) -> tuple[CoursePoint, ...]:
        """Return the counts so far; the last point may cover less time."""
        width, bins = self._state
        used = len(np.trim_zeros(bins[:, 0], "b"))
        return tuple(
            CoursePoint(place * width, width, int(batches), int(rows), ready / max(1, batches), waited)
            for place, (batches, rows, ready, waited) in enumerate(bins[:used].tolist())
        )


class BatchPlans:
    """Draws the plans of a run and counts them; an error of theirs is raised after the batches before it."""

    def __init__(self, plans: Iterable[Plan]) -> None:
        self._plans = iter(plans)
        self._outstanding = 0
        self._error: Exception | None = None

    def draw(self, enough: int) -> Iterable[BatchRequest]:
        """Draw up to ``enough`` further plans; wait for one only if no batch is due."""
        while enough > 0:
            try:
                if callable(plan := next(self._plans)):
                    if self._outstanding:
                        return
                    plan()
                    continue
            except StopIteration:
                return
            except Exception as error:  # raised again when it is due
                self._plans, self._error = iter(()), error
                return
            enough -= 1
            self._outstanding += 1
            yield plan if isinstance(plan, BatchRequest) else BatchRequest(plan)

    def claim(self) -> bool:
        """Count a drawn plan as delivered. If none is due, raise the plans' error or return False."""
        if self._outstanding:
            self._outstanding -= 1
            return True
        if self._error:
            raise self._error
        return False


class Engine(Owner, Closable):
    """Runs workers that fill batches of ``work`` in shared slots of the form ``layout``.

    No process, file or memory outlives a close, dropping the engine, or the end of this process, even if it
    is killed. One thread at a time may run it, any thread may close it; a forked copy does nothing. Errors of
    opening the work are raised by the first batch.

    A lease has at most ``chunk`` rows. A worker that spends more than ``deadline`` seconds on a row is
    killed; without a deadline, a :class:`.SlowRecord` warning names a row of more than SLOW_ROW_S, by
    ``locate``. With ``skip_crashes``, a row is left out at which MAX_ROW_FAILURES workers died by a signal of
    faulty code, such as SIGSEGV. Opening the work may take 120 seconds; with a deadline, max(deadline, 30).
    In errors, ``describe`` names an item and ``owner`` this object. Raises OperationError if memory or
    processes run out; UsageError for work that cannot be pickled.
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
        ordered: bool = True,
        describe: Callable[[Any], str] = "item {}".format,
        locate: Callable[[Any], str] | None = None,
        skip_crashes: bool = False,
        owner: str = "engine",
    ) -> None:
        check_int(workers, "workers", least=0)
        check_int(slots, "slots", least=MIN_SLOTS)
        if deadline is not None:
            check_seconds(deadline, "deadline", above=0)
        if workers:
            refuse_in_main_import()
        self._work = work
        self.layout = layout
        self._slots = slots
        self._describe = describe
        self._owner = owner
        self._run_numbers = itertools.count(1)
        self.meter = Meter()
        self.course = Course()
        self._closed = False
        self._status_table = StatusTable.of(max(1, workers), len(work.stages))
        self._dispatcher: Dispatcher | None = None
        self._trace: Trace | None = None
        self._paused_stats: EngineStats  # set with the first pause
        if workers:
            leases = Leases(
                slots=slots,
                workers=workers,
                chunk=min(chunk, MAX_LEASE_BYTES // max(1, work.item_dtype.itemsize)),
                ordered=ordered,
                skip_causes=[number.name for number in CRASHES if skip_crashes],
            )
            self._dispatcher = Dispatcher(
                work,
                leases,
                SlotRing(layout, slots),
                self._status_table,
                workers=workers,
                deadline=deadline,
                locate=locate or describe,
                owner=self,
            )

    def run(self, plans: Iterable[Plan]) -> Iterator[EngineBatch]:
        """Yield one batch per plan (an array of items, at most a slot's rows), in the plans' order.

        Plans are drawn in the caller's thread, up to ``slots`` before they get a slot. A
        :class:`.dispatcher.BatchRequest` has inputs besides its items, for which the slots must have room.
        Raises, once the batches before it are delivered, the error of the work on a row, with its traceback
        and the row's description as a note; WorkerDied if three workers died at a row; errors of the plans.
        Starting another run ends an unfinished one, which then raises UsageError.
        """
        batch_plans = BatchPlans(plans)
        self.refuse_closed()
        self.refuse_forked(self._owner)  # the parent's workers keep changing the slots
        if self._dispatcher is None:
            yield from self._run_in_thread(batch_plans)
        else:
            yield from self._run_in_workers(batch_plans, self._dispatcher)

    def refuse_closed(self) -> None:
        """Raise UsageError after :meth:`close`."""
        if self._closed:
            raise UsageError(f"this {self._owner} is closed; make a new one")

    def _run_in_thread(self, plans: BatchPlans) -> Iterator[EngineBatch]:
        run, cpu = next(self._run_numbers), CpuClock()
        self._thread_run = run
        try:
            with self._work.open(self._status_table.clock[0]) as fill:
                for number in itertools.count():
                    drawn = tuple(plans.draw(1))
                    if not plans.claim():
                        return
                    if self._closed or run != self._thread_run:
                        raise self._ended_error(closed=self._closed)
                    yield self._fill_in_thread(fill, cpu, run, number, *drawn)
        finally:
            self.meter.pause()

    def _fill_in_thread(
        self, fill: Fill, cpu: CpuClock, run: int, number: int, request: BatchRequest
    ) -> EngineBatch:
        items = request.items
        began, before = perf_counter(), cpu.read()
        batch = fill_batch(
            fill,
            number,
            items,
            layout=self.layout,
            describe_row=self._describe_row,
            inputs=request.inputs,
            rows=request.result_rows,
        )
        if request.on_filled:
            request.on_filled()
        ended = perf_counter()
        self._status_table.filling[0] += ended - began
        self._status_table.cpu[0] += cpu.read() - before
        wait = BatchWait(run, number, len(items), began, ended, ended)
        self._count(wait, ready=0)
        if (trace := self._trace) is not None:
            trace.record_filled(wait)
        return batch

    def _count(self, wait: BatchWait, *, ready: int) -> None:
        self.meter.count(wait)
        self.course.add(wait.rows, ready=ready, waited=wait.got - wait.began)

    def _run_in_workers(self, plans: BatchPlans, dispatcher: Dispatcher) -> Iterator[EngineBatch]:
        dispatcher.run.stop()
        run = dispatcher.run = EngineRun(next(self._run_numbers))
        if dispatcher.ended:  # perhaps before it saw this run
            run.stop()
        try:
            while self._top_up(run, plans, dispatcher):
                yield self._receive(run, dispatcher)
        finally:
            self.meter.pause()
            run.stop()
            dispatcher.bell.ring()

    def _top_up(self, run: EngineRun, plans: BatchPlans, dispatcher: Dispatcher) -> bool:
        """Draw plans, passing each on at once, until a batch is ready; two at least, to catch up."""
        self.refuse_forked(self._owner)  # a run may last into the next epoch, where a copy would hang
        for number, drawn in enumerate(plans.draw(self._slots - len(run.plans))):
            run.plans.append(drawn)
            dispatcher.bell.ring()
            if number and not run.results.empty():
                break
        return plans.claim()

    def _receive(self, run: EngineRun, dispatcher: Dispatcher) -> EngineBatch:
        run.paused = False
        began = perf_counter()
        is_over = dispatcher.closing or run is not dispatcher.run  # another one has begun
        result = None if is_over else run.results.get()
        got = perf_counter()
        if result is None and dispatcher.error:
            raise dispatcher.error
        if result is None:
            raise self._ended_error(closed=dispatcher.closing)
        leased, memory = result
        number, run.due = leased.number - run.first, leased.number + 1
        if leased.failure:
            raise self._row_error(leased, leased.failure, number)
        batch = self._assemble(leased, memory, copy=not dispatcher.ring.may_keep(memory))
        wait = BatchWait(run.number, leased.number, len(leased.items), began, got, perf_counter())
        self._count(wait, ready=run.results.qsize())
        if (trace := self._trace) is not None:
            trace.record_received(wait, run.results.qsize())
        return batch

    def _ended_error(self, *, closed: bool) -> ShardprepError:
        """Return the error of a run that has ended before its last plan."""
        if closed:
            return OperationError(f"the {self._owner} was closed while it ran")
        return UsageError(f"another iteration of this {self._owner} has begun; end the first, or make two")

    def _assemble(self, leased: LeasedBatch, memory: Memory, *, copy: bool) -> EngineBatch:
        """Return the batch in ``memory``, or, if ``copy``, a copy of it."""
        layout, rows = self.layout, leased.result_rows
        payloads: dict[int, object] = {}
        skipped = dict(leased.left_out)
        for part in sorted(leased.outcomes, key=attrgetter("first")):
            spare = layout.spare_bytes(memory, part.first, part.count)
            for row, outcome in part.unpack(spare, copy=copy):
                if isinstance(outcome, SkippedRow):
                    skipped[row] = outcome.reason
                else:
                    payloads[row] = outcome
        arrays = layout.arrays(memory, len(leased.items), copy=copy)
        if rows is not None:
            arrays |= rows.arrays(layout.input_area(memory), copy=copy)
        size = sum(part.nbytes for part in leased.outcomes)
        form = rows and rows.form
        skipped = dict(sorted(skipped.items()))
        return EngineBatch(leased.number, leased.items, arrays, payloads, skipped, size, form)

    def _row_error(self, leased: LeasedBatch, failure: RowFailure, number: int) -> BaseException:
        item = leased.items[failure.row]
        if failure.error:
            return unpack_error(failure.error, self._describe_row(failure.row, number, item))
        return WorkerDied(
            f"{MAX_ROW_FAILURES} workers ended at it, the last by {failure.cause}. After SIGKILL, give more memory or a "
            "longer deadline; otherwise run that work in a separate program to find the cause. Or leave it out: from "
            'the source of a Flow, by without= of a Loader or, after crashes such as SIGSEGV, by on_bad_record="skip"',
            key=self._describe(item),
        )

    def _describe_row(self, row: int, number: int, item: Any) -> str:
        return f"at row {row} of batch {number}: {printable(self._describe(item))}"

    def stats(self) -> EngineStats:
        """Return the counts so far. Thread-safe."""
        meter, table, dispatcher = self.meter, self._status_table, self._dispatcher
        if dispatcher and dispatcher.run.paused:  # workers are busy with batches that nobody has asked for
            return self._paused_stats
        return EngineStats(
            **meter.counts,
            blocked=dispatcher.blocked if dispatcher else 0.0,
            filling=tuple(table.filling.tolist()),
            waiting=tuple(table.waiting.tolist()),
            cpu=tuple(table.cpu[:, 0].tolist()),
            queued=tuple(table.cpu[:, 1].tolist()),
            stages=dict(zip(self._work.stages, table.clock.sum(axis=0).tolist(), strict=True)),
            copied=dispatcher.ring.copied if dispatcher else 0,
            restarts=dispatcher.restarts if dispatcher else 0,
        )

    @property
    def ready(self) -> int:
        """Number of finished batches waiting for the consumer; 0 without workers. Thread-safe."""
        return self._dispatcher.run.results.qsize() if self._dispatcher else 0

    @property
    def slots(self) -> int:
        """Number of batches that fit the shared memory; 0 without workers."""
        return self._slots if self._dispatcher else 0

    @property
    def most_held(self) -> int:
        """Number of batches that may be held before further ones are copied."""
        return self._dispatcher.ring.most_held if self._dispatcher else sys.maxsize

    @property
    def shared_bytes(self) -> int:
        """Bytes of memory shared with the workers (for sparse slots, the written part); 0 without workers."""
        return self._dispatcher.ring.nbytes if self._dispatcher else 0

    def pause(self) -> None:
        """Do not count the time until the next batch is asked for: as elapsed, blocked or a step."""
        self.meter.pause()
        self._paused_stats = self.stats()
        if self._dispatcher:
            run = self._dispatcher.run
            run.paused, run.first = True, run.due
        if (trace := self._trace) is not None:
            trace.pauses.append(perf_counter())

    @contextmanager
    def tracing(self, *, keep: int) -> Iterator[Trace]:
        """Context of a trace with the last ``keep`` spans of each kind. Another one ends it."""
        trace = Trace(self._status_table.clock, self._work.stages, keep=keep)
        self._set_trace(trace)
        try:
            yield trace
        finally:
            if self._trace is trace:
                self._set_trace(None)

    def _set_trace(self, trace: Trace | None) -> None:
        self._trace = trace
        if self._dispatcher:
            self._dispatcher.trace = trace

    def close(self) -> None:
        """End the workers, killing them after a second. Batches stay valid. Idempotent."""
        if self.was_made_here:
            self._closed = True
            if self._dispatcher:
                self._dispatcher.close()
            self._status_table.close()
