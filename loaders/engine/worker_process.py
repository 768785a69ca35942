"""The engine's side of one worker process, and the cause of its end."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

from shardprep.formats.processes.channel import Channel
from shardprep.formats.processes.spawned import SpawnedProcess
from shardprep.formats.system.owned import Owned
from shardprep.loaders.buffers.slots import SlotRing
from shardprep.loaders.engine.protocol.status_table import StatusTable

from .sent_work import SentWork
from .worker import main as work_on


@dataclass
class Worker(Owned):
    """The engine's side of a worker: ``ready`` once its work is open, ``overdue`` once killed by a time-out.

    ``place`` is its lease and row when the dispatcher last checked, unchanged since ``since``
    (``monotonic``).
    """

    index: int
    process: SpawnedProcess
    ready: bool = False
    overdue: bool = False
    place: tuple[int, int] = (0, 0)
    since: float = field(default_factory=monotonic)

    @property
    def channel(self) -> Channel:
        """The channel of its messages."""
        return self.process.channel


def start(
    index: int,
    wanted: Callable[[], bool],
    *,
    ring: SlotRing,
    status_table: StatusTable,
    work: SentWork,
) -> Worker:
    """Start worker number ``index``; it sends READY when its work is open.

    Its process imports the main module only if the work refers to it: a training script would load its
    framework again (1.5 s and 500 MB for TensorFlow), and run again without ``if __name__ == "__main__"``.
    Raises OperationError where no process can be started, or none is ``wanted`` any more.
    """
    process = SpawnedProcess(
        work_on,
        name=f"shardprep-worker-{index}",
        main=work.main,
        wanted=wanted,
        index=index,
        ring=ring,
        status_table=status_table,
        work=work,
    )
    return Worker(index, process)


def cause_of(code: int | None) -> str:
    """Describe an exit code: "SIGSEGV", "exit code 1"."""
    if code is None:
        return "something unknown"
    if code >= 0:
        return f"exit code {code}"
    known = {int(number): number.name for number in signal.Signals}
    return known.get(-code, f"signal {-code}")
