"""Work of other processes: some fork one that stays alive with all that they had open, some end or sleep."""

import os
import signal
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shardprep.formats.runtime.processes import Channel


def fork_one_that_lives(folder: Path) -> None:
    """Fork a process that sleeps, and leave a file that is named for it."""
    pid = os.fork()
    if not pid:
        for descriptor in (0, 1, 2):  # otherwise the test's own streams would stay open
            os.close(descriptor)
        time.sleep(3600)
        os._exit(0)
    (folder / str(pid)).touch()


def kill_those_of(folder: Path) -> None:
    """End the processes that were forked by :func:`fork_one_that_lives`."""
    for path in folder.iterdir():
        if path.name.isdecimal():
            os.kill(int(path.name), signal.SIGKILL)


@dataclass(frozen=True)
class ForkThen:
    """Fork a process that stays alive, and then do ``action``."""

    folder: Path
    action: Callable[[int], object]

    def __call__(self, item: int = 0) -> object:
        fork_one_that_lives(self.folder)
        return self.action(item)


def stopped_within_its_answer(item: int) -> None:
    os.write(_channel().fileno(), struct.pack("<Q", 1000) + b"half")
    os.kill(os.getpid(), signal.SIGSTOP)


def _channel() -> Channel:
    frame = sys._getframe()
    while "channel" not in frame.f_locals:
        assert frame.f_back is not None
        frame = frame.f_back
    found: Channel = frame.f_locals["channel"]
    return found


def say_three_things_and_leave(channel: Channel, *, folder: Path) -> None:
    """Run a process that ends while a process that it forked stays alive."""
    fork_one_that_lives(folder)
    for thing in (b"one", b"two", b"three" * 10_000):
        channel.send(thing)
    os._exit(3)


def sleeps(noted: Path) -> None:
    """Note the process's id, then sleep without end."""
    part = noted.with_suffix(".part")
    part.write_text(str(os.getpid()))
    part.rename(noted)
    time.sleep(3600)
