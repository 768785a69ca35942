"""A pipe that wakes a thread that waits in a selector."""

from __future__ import annotations

import os
from contextlib import suppress

from shardprep.formats.system.descriptor import Descriptor
from shardprep.formats.system.owned import Owned


class Bell(Owned):
    """A pipe that wakes a thread that waits for it in a selector.

    It may be rung in any thread and in a garbage collection: ringing takes no lock, never waits, and does
    nothing in a forked copy of the process. It has no close: an object that may still ring it keeps it open,
    so that no byte goes to a reused descriptor number.
    """

    def __init__(self) -> None:
        self._read_end, self._write_end = map(Descriptor, os.pipe())
        os.set_blocking(self.fileno(), False)
        os.set_blocking(self._write_end.fileno(), False)

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._read_end.fileno()

    def ring(self) -> None:
        """Wake the thread, now or when it next waits."""
        if self.made_here:
            with suppress(OSError):  # the pipe is full, or was finalized in the same garbage collection
                os.write(self._write_end.fileno(), b"\0")

    def silence(self) -> None:
        """Empty the pipe, so that the thread can wait again."""
        with suppress(BlockingIOError):
            os.read(self.fileno(), 1 << 12)
