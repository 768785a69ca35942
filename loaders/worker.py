"""A worker process: takes leases, fills their rows, answers. It imports what the work needs, no more."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter

from . import failures
from .board import IDLE, Board
from .channels import Channel, Part
from .cpu_clock import CpuClock
from .leases import Lease
from .messages import Answer, pack_answer, unpack_lease
from .payloads import Packer
from .slots import CARGO, SlotRing
from .trusted import loads
from .work import Fill, Items, Work, outcomes


def main(
    index: int, parent: int, *, end: socket.socket, ring: SlotRing, board: Board, pickled_work: bytes
) -> None:
    """Work until the engine, in process ``parent``, has no more to do or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the engine's to handle
    threading.Thread(target=_die_with, args=(parent, end.fileno()), daemon=True).start()
    channel = Channel(end)
    with ExitStack() as opened:
        opened.callback(end.detach)  # it ends with the process, not before
        try:
            work: Work = loads(pickled_work)
            fill = opened.enter_context(work.open(board.clock[index]))
        except Exception as error:  # raised again in the process that waits for the work
            _say(channel, pack_answer(Answer.FAILED), failures.pack(error))
            return
        _say(channel, pack_answer(Answer.READY))
        _Desk(index, channel, ring, board, work, fill).serve()


@dataclass(frozen=True)
class _Desk:
    index: int
    channel: Channel
    ring: SlotRing
    board: Board
    work: Work
    fill: Fill

    def serve(self) -> None:
        """Finish leases until no more come."""
        began, cpu = perf_counter(), CpuClock()
        spent = cpu.read()
        while (message := self.channel.receive()) is not None:
            got = perf_counter()
            _say(self.channel, *self._answer(unpack_lease(message, self.work.item_dtype)))
            self.board.lease[self.index] = (
                IDLE  # not before it is said: who dies until then dies of this lease
            )
            self.board.waiting[self.index] += got - began
            began = perf_counter()
            self.board.filling[self.index] += began - got
            before, spent = spent, cpu.read()  # one reading for each lease: who waits spends nothing
            self.board.cpu[self.index] += spent - before

    def _answer(self, lease: Lease) -> tuple[Part, ...]:
        try:
            packer = self._finish(lease)
        except BaseException as error:  # raised again, or told, in the process that waits for this row
            _, row = self.board.place(self.index)
            return pack_answer(Answer.FAILED, lease.id, row), failures.pack(error)
        return pack_answer(Answer.DONE, lease.id), *packer.parts()

    def _finish(self, lease: Lease) -> Packer:
        arrays, packer = self._rows_of(lease)
        self.board.row[self.index] = 0
        self.board.lease[self.index] = lease.id
        if self._is_stale(lease):
            return packer
        for outcome in outcomes(self.fill, lease.items, arrays, packer.room):
            packer.add(outcome)
            self.board.row[self.index] = packer.rows
            if self._is_stale(lease):
                break
        return packer

    def _rows_of(self, lease: Lease) -> tuple[dict[str, Items], Packer]:
        memory, layout = self.ring.memory(lease.slot), self.ring.layout
        end = lease.first + len(lease.items)
        arrays = {name: array[lease.first : end] for name, array in layout.arrays(memory, end).items()}
        if layout.cargo:
            arrays[CARGO] = layout.cargo_bytes(memory)
        return arrays, Packer(layout.spare_bytes(memory, lease.first, len(lease.items)))

    def _is_stale(self, lease: Lease) -> bool:
        return bool(self.board.run[self.index] != lease.run)


def _say(channel: Channel, *parts: Part) -> None:
    try:
        channel.send(*parts)
    except OSError:  # nobody is left to hear it
        os._exit(1)


def _die_with(parent: int, end: int) -> None:
    """End this process when its parent has ended, whatever it is doing.

    PR_SET_PDEATHSIG would look at the thread that started the worker, not at the process. A forked
    copy of the parent keeps the socket open, hence the second look at who the parent is.
    """
    poller = select.poll()
    poller.register(end, 0)  # nothing asked for: only the hang-up is reported
    while not poller.poll(1000) and os.getppid() == parent:
        pass
    os._exit(1)
