"""A file descriptor that is closed once, since its number may be another file's afterwards."""

from __future__ import annotations

import fcntl
import os
import weakref
from contextlib import suppress

from .owned import Owned


class Descriptor(Owned):
    """A descriptor that is closed once, at the latest by the finalizer, only in the process that opened it.

    In a forked copy of that process the number may be another file's: a daemon closes all descriptors that
    it inherited. Closing takes no lock.
    """

    _number = -1

    def __init__(self, number: int) -> None:
        self._number = number

    def fileno(self) -> int:
        """Return the number; -1 once it is closed."""
        return self._number

    def close(self) -> None:
        """Close the descriptor. Idempotent; does nothing in a forked copy of the process that opened it."""
        number, self._number = self._number, -1
        if number >= 0 and self.made_here:
            os.close(number)

    def __del__(self) -> None:
        self.close()


_locks: weakref.WeakSet[LockDescriptor] = weakref.WeakSet()


def _close_inherited_locks() -> None:
    """Close the locks in a forked copy of this process, which otherwise keeps them after it."""
    for lock in _locks:
        number, lock._number = lock._number, -1  # which may be another file's from here on
        with suppress(OSError):
            os.close(number)
    _locks.clear()


os.register_at_fork(after_in_child=_close_inherited_locks)


class LockDescriptor(Descriptor):
    """A descriptor of a file that is locked with ``flock``. A forked copy of the process has it closed."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        _locks.add(self)

    def lock(self, *, shared: bool = False, wait: bool = True) -> bool:
        """Take the lock, or change it; return whether this one has it. Waits for others if it may.

        A change of a lock is not atomic: another one may have had it in between.
        """
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            fcntl.flock(self.fileno(), kind if wait else kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """Release the lock, for copies of the descriptor, too, and close it. Idempotent."""
        if self.fileno() >= 0 and self.made_here:
            fcntl.flock(self.fileno(), fcntl.LOCK_UN)
        super().close()
