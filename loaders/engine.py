"""Batches from several processes: each row once, in shared memory, in order, whoever dies on the way."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Self

import numpy.typing as npt

from ..formats.errors import OperationError, UsageError, WorkerDied
from . import failures
from .batches import Batch
from .board import Board
from .cpu_clock import CpuClock
from .dispatcher import Dispatcher
from .inline import fill_batch
from .leases import STRIKES, Failure, LeasedBatch, Leases
from .messages import MAX_LEASE_BYTES
from .plans import Plans, Shipment
from .processes import start
from .runs import Failed, Run
from .slots import MIN_SLOTS, SlotLayout, SlotRing
from .timings import EngineStats, Meter
from .trace import KEEP, Reception, Trace
from .trusted import dumps_noting_main
from .work import Fill, Items, Work


def _number(item: Any) -> str:
    return f"item {item}"


class Engine:
    """``workers`` processes that fill batches in ``slots`` shared slots; with none, the calling thread does.

    A lease has at most ``chunk`` rows. ``deadline`` is how many seconds one row may take before its worker
    is killed, None for ever: set it where work can hang, well above the slowest row. Unless ``ordered``,
    batches come as they are finished. ``describe`` names an item in errors, in the thread that gets them. Raises OperationError when there is too little memory,
    UsageError when the work cannot be pickled; what its opening raises, the first batch raises.

    Close it, or drop it, or let the interpreter end: no process, file or memory stays, not even when this
    process is killed. One thread at a time may run it, any thread close it; a forked copy of it does nothing.
    """

    def __init__(
        self,
        work: Work,
        layout: SlotLayout,
        *,
        workers: int,
        slots: int = 8,
        chunk: int = 32,
        deadline: float | None = None,
        ordered: bool = True,
        describe: Callable[[Any], str] = _number,
    ) -> None:
        _check(work, workers=workers, slots=slots, chunk=chunk, deadline=deadline)
        self._work = work
        self._layout = layout
        self._slots = slots
        self._describe = describe
        self._numbers = itertools.count(1)
        self._meter = Meter()
        self._pid = os.getpid()
        self._closed = False
        self._board = Board(max(1, workers), len(work.stages))
        self._ring: SlotRing | None = None
        self._dispatcher: Dispatcher | None = None
        self._trace: Trace | None = None
        if workers:
            chunk = min(chunk, MAX_LEASE_BYTES // max(1, work.item_dtype.itemsize))
            self._launch(
                Leases(slots=slots, workers=workers, chunk=chunk, ordered=ordered), workers, deadline
            )

    def _launch(self, leases: Leases, workers: int, deadline: float | None) -> None:
        pickled, of_main = _pickled(self._work)
        ring = SlotRing(self._layout, self._slots)
        begin = partial(start, ring=ring, board=self._board, pickled_work=pickled, of_main=of_main)
        dispatcher = Dispatcher(begin, leases, ring, self._board, deadline=deadline)
        # multiprocessing's own, for it runs before multiprocessing ends what it takes for forgotten children
        Finalize(self, dispatcher.close, exitpriority=10)
        dispatcher.launch(workers)
        self._ring, self._dispatcher = ring, dispatcher

    def run(self, plans: Iterable[npt.ArrayLike | Shipment]) -> Iterator[Batch]:
        """One batch per plan (an array of items, at most as many as a slot has rows), in the plans' order.

        Plans are drawn in the caller's thread, up to ``slots`` of them before their batches can be begun. A
        :class:`.plans.Shipment` has cargo beside its items, which the slots' layout must have room for.
        Raises what the work raised for a row, with its traceback and the row's description as a note, once
        the batches before it are delivered; WorkerDied where a row ended three workers; what the plans raise.
        However a run ends, another may follow; beginning it ends the one before, which raises UsageError.
        """
        drawn = Plans(plans, dtype=self._work.item_dtype, rows=self._layout.rows)
        if self._closed:
            raise UsageError("this engine is closed; make a new one")
        self._refuse_copy()
        if self._dispatcher is None or self._ring is None:
            yield from self._run_here(drawn)
        else:
            yield from self._run_there(drawn, self._dispatcher, self._ring)

    def _run_here(self, plans: Plans) -> Iterator[Batch]:
        run = next(self._numbers)
        with self._meter.run(), self._work.open(self._board.clock[0]) as fill:
            for number in itertools.count():
                drawn = tuple(plans.draw(1))
                if not plans.claim():
                    return
                yield self._filled_here(fill, run, number, *(shipment.items for shipment in drawn))

    def _filled_here(self, fill: Fill, run: int, number: int, items: Items) -> Batch:
        began, cpu = perf_counter(), CpuClock()
        before = cpu.read()
        batch = fill_batch(fill, number, items, layout=self._layout, where=self._where)
        took = perf_counter() - began
        self._board.filling[0] += took
        self._board.cpu[0] += cpu.read() - before
        self._meter.waited(took)
        self._meter.handed(len(items), 0.0)
        if (trace := self._trace) is not None:
            trace.filled_here(run, number, len(items), began)
        return batch

    def _run_there(self, plans: Plans, dispatcher: Dispatcher, ring: SlotRing) -> Iterator[Batch]:
        run = self._begin(dispatcher)
        try:
            with self._meter.run():
                while self._top_up(run, plans, dispatcher):
                    yield self._receive(run, dispatcher, ring)
        finally:
            run.stop()
            dispatcher.bell.ring()

    def _begin(self, dispatcher: Dispatcher) -> Run:
        dispatcher.run.stop()
        run = dispatcher.run = Run(next(self._numbers))
        if dispatcher.ended:  # perhaps without having seen it
            run.stop()
        return run

    def _refuse_copy(self) -> None:
        """A forked copy sees the parent's slots, which go on changing."""
        if self._pid != os.getpid():
            raise UsageError(
                "this engine belongs to the process that this one was forked from; make a new one"
            )

    def _top_up(self, run: Run, plans: Plans, dispatcher: Dispatcher) -> bool:
        """Each plan is handed on as it is drawn, and none is waited for while a batch is ready."""
        self._refuse_copy()
        for drawn in plans.draw(self._slots - len(run.plans)):
            run.plans.append(drawn)
            dispatcher.bell.ring()
            if not run.results.empty():
                break
        return plans.claim()

    def _receive(self, run: Run, dispatcher: Dispatcher, ring: SlotRing) -> Batch:
        began = perf_counter()
        result = run.results.get()
        got = perf_counter()
        if result is None:
            raise self._why_ended(dispatcher)
        leased = result.batch
        if isinstance(result, Failed):
            raise self._error_of(leased, result.failure)
        self._meter.waited(got - began)
        batch = Batch.assemble(
            leased.number,
            leased.items,
            layout=self._layout,
            memory=result.memory,
            parcels=leased.parcels,
            written=leased.written,
            copied=not ring.may_keep(leased.slot),
        )
        ended = perf_counter()
        self._meter.handed(len(leased.items), ended - got)
        if (trace := self._trace) is not None:
            reception = Reception(run.number, leased.number, len(leased.items), began, got, ended)
            trace.received(reception, run.results.qsize())
        return batch

    def _why_ended(self, dispatcher: Dispatcher) -> BaseException:
        if dispatcher.error:
            return dispatcher.error
        if dispatcher.ended:
            return OperationError("the engine was closed while it ran")
        return UsageError("another run of this engine has begun; end the first before it, or use two engines")

    def _error_of(self, leased: LeasedBatch, failure: Failure) -> BaseException:
        item = leased.items[failure.row]
        where = self._where(failure.row, leased.number, item)
        if failure.error:
            return failures.unpack(failure.error, where)
        return WorkerDied(
            f"{STRIKES} workers ended {where}, the last by {failure.cause}; "
            "use workers=0 (a map without processes) to see what happens there, or leave it out",
            key=self._describe(item),
        )

    def _where(self, row: int, number: int, item: Any) -> str:
        return f"at row {row} of batch {number}: {self._describe(item)}"

    def stats(self) -> EngineStats:
        """What was counted until now; from any thread."""
        copied = self._ring.copied if self._ring else 0
        return self._meter.read(self._board, self._work.stages, dispatcher=self._dispatcher, copied=copied)

    @property
    def layout(self) -> SlotLayout:
        """The form of a batch."""
        return self._layout

    @property
    def most_held(self) -> int:
        """How many batches may be held before further ones are copied."""
        return self._ring.most_held if self._ring else sys.maxsize

    @property
    def shared_bytes(self) -> int:
        """The memory shared with the workers, all slots together; 0 without workers."""
        return self._slots * self._layout.nbytes if self._dispatcher else 0

    def record(self, *, keep: int = KEEP) -> Trace:
        """A new trace, of what happens until :meth:`stop_recording`."""
        trace = Trace(self._board.clock, self._work.stages, keep=keep)
        self._follow(trace)
        return trace

    def stop_recording(self, trace: Trace) -> None:
        """Leave the trace as it is, unless another one was begun since."""
        if self._trace is trace:
            self._follow(None)

    def _follow(self, trace: Trace | None) -> None:
        self._trace = trace
        if self._dispatcher:
            self._dispatcher.trace = trace

    def close(self) -> None:
        """End the workers: give each a second to end by itself, then kill. Batches stay valid. Idempotent."""
        if self._pid == os.getpid():
            self._closed = True
            if self._dispatcher:
                self._dispatcher.close()
            self._board.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check(work: Work, *, workers: int, slots: int, chunk: int, deadline: float | None) -> None:
    no_deadline = deadline is not None and not 0 < deadline < math.inf
    if workers < 0 or slots < MIN_SLOTS or chunk < 1 or no_deadline:
        raise UsageError(
            f"workers={workers}, slots={slots}, chunk={chunk}, deadline={deadline}: there must be at least "
            f"0 workers, {MIN_SLOTS} slots and 1 row in a chunk, and a deadline above 0"
        )
    if workers and multiprocessing.current_process().daemon:
        raise UsageError(
            "a daemonic process cannot have workers of its own; use workers=0 (a map with threads) in it"
        )
    if work.item_dtype.hasobject or work.item_dtype.itemsize > MAX_LEASE_BYTES:
        raise UsageError(
            f"{work.item_dtype} is not a dtype of plain values of at most {MAX_LEASE_BYTES} bytes"
        )


def _pickled(work: Work) -> tuple[bytes, bool]:
    """And whether the work refers to the main module."""
    try:
        pickled, of_main = dumps_noting_main(work)
        if of_main and not Path(getattr(sys.modules["__main__"], "__file__", None) or "").is_file():
            raise UsageError(
                "it is defined in a notebook or on standard input, which no other process imports"
            )
        return pickled, of_main
    except Exception as error:
        raise UsageError(
            f"the work cannot be sent to the workers ({error}); define what it uses at the top level of a "
            "module, or work without processes (workers=0)"
        ) from error
