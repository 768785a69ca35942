"""The worker process: it receives its work once, then leases, fills their rows and answers."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import UsageError
from shardprep.formats.runtime.processes import (
    Channel,
    Part,
    import_main,
    keep_freed_memory,
    main_module,
    use_one_thread,
)
from shardprep.loaders.batches.pickling import PICKLING_ADVICE, class_pickles, loads, pickle_for_process
from shardprep.loaders.batches.slots import INPUTS, SlotLayout, SlotRing
from shardprep.loaders.engine.leases import Answer, Lease, pack_answer, unpack_lease
from shardprep.loaders.engine.messages import CpuClock, Fill, OutcomeWriter, RowTask, StatusTable, pack_error

# A sparse slot keeps the memory that its largest results took, so what exceeds twice the usual size is sent.
ALWAYS_SPARE, FADING = 4 << 20, 0.98

UNIMPORTABLE = "it is defined in a notebook or on standard input, which no other process imports"


def share_work(work: RowTask) -> tuple[SlotRing, Mapping[str, str]]:
    """Pickle the work into shared memory; return this, and where the main module is if the work needs it.

    The pipe through which multiprocessing prepares a child holds 64 KiB: with more data, the start would wait
    forever for a child that is stopped or dead. With cloudpickle, lambdas, closures and definitions of the
    main module are pickled by value. Raises UsageError if the work cannot be pickled.
    """
    file = getattr(sys.modules["__main__"], "__file__", None)
    has_file = getattr(sys, "frozen", False) or Path(file or "").is_file()
    class_pickles.clear()  # classes may have changed since the workers before
    try:
        pickled = pickle_for_process(work, with_main=has_file)
        if pickled.needs_main and not has_file:
            raise ImportError(UNIMPORTABLE)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"the work cannot be sent to the workers ({error}): {PICKLING_ADVICE}, or work without processes (workers=0)"
        ) from error
    ring = SlotRing(SlotLayout(0, (), inputs=len(pickled.data)), slots=1)
    ring.layout.input_area(ring.memory(0))[:] = np.frombuffer(pickled.data, np.uint8)
    return ring, main_module() if pickled.needs_main else {}


def run_worker(
    channel: Channel,
    *,
    main: Mapping[str, str],
    index: int,
    ring: SlotRing,
    status_table: StatusTable,
    work: SlotRing,
) -> None:
    """Fill leases until the engine closes the channel."""
    with ExitStack() as opened:
        try:
            import_main(main)
            task: RowTask = loads(work.layout.input_area(work.memory(0)).data)
            use_one_thread()
            keep_freed_memory()
            fill = opened.enter_context(task.open(status_table.clock[index]))
        except Exception as error:  # raised again in the process that waits for the work
            _send(channel, pack_answer(Answer.FAILED), pack_error(error))
            return
        gc.freeze()  # a collection no longer traverses what was imported: 1.5% of the CPU of small crops
        _send(channel, pack_answer(Answer.READY))
        began, cpu, past = perf_counter(), CpuClock(), np.zeros(2)
        spent = cpu.read()
        while (message := channel.receive()) is not None:
            got = perf_counter()
            lease = unpack_lease(message, task.item_dtype)
            _send(channel, *_fill_lease(lease, fill, ring, status_table, index, past))
            # After the answer: if a worker dies before answering, it died at this lease.
            status_table.set_idle(index)
            status_table.waiting[index] += got - began
            began = perf_counter()
            status_table.filling[index] += began - got
            before, spent = spent, cpu.read()  # one reading per lease: waiting takes no CPU time
            status_table.cpu[index] += spent - before


def _fill_lease(
    lease: Lease,
    fill: Fill,
    ring: SlotRing,
    status_table: StatusTable,
    index: int,
    past: npt.NDArray[np.float64],
) -> tuple[Part, ...]:
    """Fill the lease's rows, until its run is over, and return the parts of the answer.

    ``past`` has the numbers of rows and bytes of the leases before, of which those long ago count less.
    """
    try:
        memory, layout = ring.memory(lease.slot), ring.layout
        rows = len(lease.items)
        end = lease.first + rows
        arrays = {name: array[lease.first : end] for name, array in layout.arrays(memory, end).items()}
        if layout.inputs:
            arrays[INPUTS] = layout.input_area(memory)
        is_limited = layout.sparse and past[0] > 0
        most = max(ALWAYS_SPARE, int(2 * rows * past[1] / past[0])) if is_limited else None
        writer = OutcomeWriter(layout.spare_bytes(memory, lease.first, rows), most)
        status_table.row[index] = 0
        status_table.lease[index] = lease.id
        if status_table.run[index] == lease.run:
            for _, outcome in zip(range(rows), fill(lease.items, arrays, writer.room), strict=True):
                writer.add(outcome)
                status_table.row[index] = writer.rows
                if status_table.run[index] != lease.run:
                    break
        past[:] = past * FADING + (writer.rows, writer.nbytes)
    except BaseException as error:  # raised again, or reported, in the process that waits for this row
        _, row = status_table.place(index)
        return pack_answer(Answer.FAILED, lease.id, row), pack_error(error)
    return pack_answer(Answer.DONE, lease.id), *writer.parts()


def _send(channel: Channel, *parts: Part) -> None:
    try:
        channel.send(*parts)
    except OSError:  # the engine's end is closed
        os._exit(1)
