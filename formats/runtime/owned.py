"""Owners of system resources, such as descriptors, locks and threads, each released exactly once.

A copy of an owner would have the same descriptor, and would close it under the original, or later close
another file.
"""

from __future__ import annotations

import _thread
import fcntl
import os
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar, Self, SupportsIndex

from shardprep.formats.errors import NotCopyable, UsageError


class Closable:
    """Base of what a context closes at its end."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Owned:
    """Base of owners, which cannot be copied: ``copy`` and ``pickle`` raise NotCopyable at once.

    ``instead`` is the error's advice. In a forked copy of the process that made it, an owner must not be
    used, and releases nothing.
    """

    instead: ClassVar[str] = "make a new one where it is needed"

    _pid: int

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        owner = super().__new__(cls)
        object.__setattr__(owner, "_pid", os.getpid())  # subclasses may be frozen dataclasses
        return owner

    @property
    def made_here(self) -> bool:
        """Whether this process made the object, not one that it was forked from."""
        return self._pid == os.getpid()

    def refuse_forked(self, name: str) -> None:
        """Raise UsageError, which calls this ``name``, in a forked copy of the process that made it."""
        if not self.made_here:
            raise UsageError(f"this {name} belongs to the process that forked this one; make another")

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        """Raise NotCopyable; ``copy`` and ``pickle`` call this first."""
        raise not_copyable(self, self.instead)


def not_copyable(owner: object, instead: str) -> NotCopyable:
    return NotCopyable(
        f"a {type(owner).__name__} cannot be copied or pickled, because what it owns exists only once; "
        f"{instead}"
    )


class Descriptor(Owned):
    """A descriptor that is closed once, at the latest by its finalizer, and only in the opening process.

    In a forked copy of that process the number may belong to another file, because a daemon closes all
    inherited descriptors. Closing takes no lock.
    """

    _number = -1

    def __init__(self, number: int) -> None:
        self._number = number

    def fileno(self) -> int:
        """Return the descriptor's number; -1 once it is closed."""
        return self._number

    def close(self) -> None:
        """Close the descriptor, unless this process is a forked copy. Idempotent."""
        number, self._number = self._number, -1
        if number >= 0 and self.made_here:
            os.close(number)

    def __del__(self) -> None:
        self.close()


_locks: weakref.WeakSet[LockDescriptor] = weakref.WeakSet()


def _close_inherited_locks() -> None:
    """In a forked copy of this process, close the locks, which it would hold for as long as it lives."""
    for lock in _locks:
        number, lock._number = lock._number, -1  # the number may be reused from here on
        with suppress(OSError):
            os.close(number)


os.register_at_fork(after_in_child=_close_inherited_locks)


class LockDescriptor(Descriptor):
    """A descriptor of a file locked with ``flock``. A forked copy of the process closes it at once."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        _locks.add(self)

    def lock(self, *, shared: bool = False, wait: bool = True) -> bool:
        """Take or convert the lock, by default waiting for others; return whether it is held.

        Converting a lock is not atomic: another process may hold it in between.
        """
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        with suppress(BlockingIOError):
            fcntl.flock(self.fileno(), kind if wait else kind | fcntl.LOCK_NB)
            return True
        return False

    def close(self) -> None:
        """Release the lock, also for copies of the descriptor, and close it. Idempotent."""
        if self.fileno() >= 0 and self.made_here:
            fcntl.flock(self.fileno(), fcntl.LOCK_UN)
        super().close()


class CollectedEnd(Owned):
    """Calls ``end`` once: when this is called, when ``owner`` is garbage-collected, or at program exit.

    Garbage collection may run in any thread, even one that holds a lock that ``end`` waits for, so it calls
    ``end`` in a new thread. ``end`` must not refer to the owner.
    """

    def __init__(self, owner: object, end: Callable[[], object]) -> None:
        self._end = end
        self._finalizer = weakref.finalize(owner, _collected, end)

    @property
    def is_over(self) -> bool:
        return not self._finalizer.alive

    def __call__(self) -> None:
        if self._finalizer.detach():
            self._end()


def _collected(end: Callable[[], object]) -> None:
    if threading.main_thread().is_alive():
        _thread.start_new_thread(end, ())  # unlike threading.Thread, it takes no locks
    else:  # at program exit, in the main thread, which threading counts as ended
        end()
