"""Starting and ending one worker process, and finding out what ended it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import weakref
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess

from ..formats.child import SPAWN, starting_process
from .board import Board
from .channels import Channel
from .slots import SlotRing
from .worker import main

_started: weakref.WeakSet[SpawnProcess] = weakref.WeakSet()


@dataclass
class Worker:
    """The engine's side of a worker: ``ready`` once its work is open, ``overdue`` once killed for being it.

    ``place`` is where the board had it when the dispatcher last looked, and since ``since``.
    """

    index: int
    process: SpawnProcess
    channel: Channel
    ready: bool = False
    overdue: bool = False
    place: tuple[int, int] = (0, 0)
    since: float = 0.0

    def end(self, patience: float) -> int | None:
        """Let it end by itself for ``patience`` seconds, else kill it; its exit code, negative for a signal.

        When this returns, the process writes to no slot any more.
        """
        self.process.join(patience)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.channel.close()
        code = self.process.exitcode
        with suppress(ValueError):  # somebody else has reaped it
            self.process.close()
        return code


def start(index: int, ring: SlotRing, board: Board, pickled_work: bytes, *, of_main: bool) -> Worker:
    """Start worker number ``index``; it says READY when its work is open.

    Its process imports the main module only if the work is ``of_main``: a training script would load its
    framework again (1.5 s and 500 MB for TensorFlow), and run again without ``if __name__ == "__main__"``.
    """
    ours, theirs = socket.socketpair()
    with theirs, starting_process(main_visible=of_main):
        process = SPAWN.Process(
            target=main,
            args=(index, os.getpid()),
            kwargs={"end": theirs, "ring": ring, "board": board, "pickled_work": pickled_work},
            name=f"shardprep-worker-{index}",
            daemon=True,
        )
        try:
            process.start()
        except BaseException:
            ours.close()
            raise
    _started.add(process)
    return Worker(index, process, Channel(ours))


def _disown() -> None:
    for process in _started:
        multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]


os.register_at_fork(after_in_child=_disown)  # or a forked copy of this process, exiting, ends our workers


def cause_of(code: int | None) -> str:
    """What an exit code says: "SIGSEGV", "exit code 1"."""
    if code is None:
        return "something unknown"
    if code >= 0:
        return f"exit code {code}"
    known = {int(number): number.name for number in signal.Signals}
    return known.get(-code, f"signal {-code}")
