"""A worker process: it receives leases, fills their rows and answers. It imports only what the work needs."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter

from shardprep.formats.processes.channel import Channel, Part
from shardprep.formats.system.owned import Owned
from shardprep.loaders.buffers.slots import INPUTS, SlotRing
from shardprep.loaders.engine.protocol.leases import Lease
from shardprep.loaders.engine.protocol.messages import Answer, pack_answer, unpack_lease
from shardprep.loaders.engine.protocol.payloads import OutcomeWriter
from shardprep.loaders.engine.protocol.status_table import IDLE, CpuClock, StatusTable
from shardprep.loaders.engine.protocol.task import Fill, Items, RowTask, outcomes

from .protocol import worker_errors
from .sent_work import SentWork


def main(
    channel: Channel,
    begin: Callable[[], None],
    *,
    index: int,
    ring: SlotRing,
    status_table: StatusTable,
    work: SentWork,
) -> None:
    """Fill leases until the engine closes the channel."""
    with ExitStack() as opened:
        try:
            begin()
            received = work.received()
            fill = opened.enter_context(received.open(status_table.clock[index]))
        except Exception as error:  # raised again in the process that waits for the work
            _send(channel, pack_answer(Answer.FAILED), worker_errors.pack(error))
            return
        _send(channel, pack_answer(Answer.READY))
        _WorkerLoop(index, channel, ring, status_table, received, fill).serve()


@dataclass(frozen=True)
class _WorkerLoop(Owned):
    index: int
    channel: Channel
    ring: SlotRing
    status_table: StatusTable
    work: RowTask
    fill: Fill

    def serve(self) -> None:
        """Finish leases until the channel ends."""
        began, cpu = perf_counter(), CpuClock()
        spent = cpu.read()
        while (message := self.channel.receive()) is not None:
            got = perf_counter()
            _send(self.channel, *self._answer(unpack_lease(message, self.work.item_dtype)))
            # After the answer: a worker that dies before it counts as one that died at this lease.
            self.status_table.lease[self.index] = IDLE
            self.status_table.waiting[self.index] += got - began
            began = perf_counter()
            self.status_table.filling[self.index] += began - got
            before, spent = spent, cpu.read()  # one reading per lease: waiting takes no CPU time
            self.status_table.cpu[self.index] += spent - before

    def _answer(self, lease: Lease) -> tuple[Part, ...]:
        try:
            packer = self._finish(lease)
        except BaseException as error:  # raised again, or reported, in the process that waits for this row
            _, row = self.status_table.place(self.index)
            return pack_answer(Answer.FAILED, lease.id, row), worker_errors.pack(error)
        return pack_answer(Answer.DONE, lease.id), *packer.parts()

    def _finish(self, lease: Lease) -> OutcomeWriter:
        arrays, packer = self._rows_of(lease)
        self.status_table.row[self.index] = 0
        self.status_table.lease[self.index] = lease.id
        if self._is_stale(lease):
            return packer
        for outcome in outcomes(self.fill, lease.items, arrays, packer.room):
            packer.add(outcome)
            self.status_table.row[self.index] = packer.rows
            if self._is_stale(lease):
                break
        return packer

    def _rows_of(self, lease: Lease) -> tuple[dict[str, Items], OutcomeWriter]:
        memory, layout = self.ring.memory(lease.slot), self.ring.layout
        end = lease.first + len(lease.items)
        arrays = {name: array[lease.first : end] for name, array in layout.arrays(memory, end).items()}
        if layout.inputs:
            arrays[INPUTS] = layout.input_area(memory)
        return arrays, OutcomeWriter(layout.spare_bytes(memory, lease.first, len(lease.items)))

    def _is_stale(self, lease: Lease) -> bool:
        return bool(self.status_table.run[self.index] != lease.run)


def _send(channel: Channel, *parts: Part) -> None:
    try:
        channel.send(*parts)
    except OSError:  # the engine's end is closed
        os._exit(1)
