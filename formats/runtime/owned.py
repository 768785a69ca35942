"""Owners of system resources, such as descriptors, locks and threads, each released exactly once.

A copy of an owner would have the same descriptor, and would close it under the original, or later close
another file.
"""

from __future__ import annotations

import _thread
import atexit
import fcntl
import os
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing.context import get_spawning_popen
from typing import Any, ClassVar, NoReturn, Self, SupportsIndex

from shardprep.formats.errors import NotCopyable, OperationError, UsageError


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
        self._refuse_copying()

    def _refuse_copying(self) -> NoReturn:
        raise not_copyable(self, self.instead)


def not_copyable(owner: object, instead: str) -> NotCopyable:
    return NotCopyable(
        f"a {type(owner).__name__} cannot be copied or pickled, because what it owns exists only once; "
        f"{instead}"
    )


class Inheritable(Owned):
    """An owner that can be pickled only while multiprocessing starts a child, which inherits it."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        """Return ``__reduce__()``. Raises NotCopyable unless this thread is starting a child."""
        if get_spawning_popen() is None:
            self._refuse_copying()
        return self.__reduce__()


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
    """In a forked copy of this process, close the locks, which it would otherwise hold on to."""
    for lock in _locks:
        number, lock._number = lock._number, -1  # the number may be reused from here on
        with suppress(OSError):
            os.close(number)
    _locks.clear()


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


End = Callable[[], object]

_exits = False
_running: list[End] = []


class CollectedEnd(Owned):
    """Calls ``end`` once: when this is called, when ``owner`` is garbage-collected, or at program exit.

    Garbage collection may run in any thread, even one that holds a lock that ``end`` waits for, so it calls
    ``end`` in a new thread. ``end`` must not refer to the owner.
    """

    def __init__(self, owner: object, end: End) -> None:
        self._end = end
        self._finalizer = weakref.finalize(owner, _collected, end)
        _notice_exit()

    @property
    def is_over(self) -> bool:
        return not self._finalizer.alive

    def __call__(self) -> None:
        if self._finalizer.detach():
            self._end()


def _collected(end: End) -> None:
    if _exits:  # in the main thread, after the program
        end()
    else:
        _running.append(end)
        try:
            _thread.start_new_thread(_end, (end,))  # unlike threading.Thread, it takes no locks
        except RuntimeError:
            _running.remove(end)
            raise


def _end(end: End) -> None:
    try:
        end()
    finally:
        _running.remove(end)


def running_ends() -> int:
    """Return how many ``end`` calls are running in their own threads."""
    return len(_running)


@cache
def _notice_exit() -> None:
    """Set ``_exits`` at exit: this handler is registered after weakref's, so it runs before that one."""
    atexit.register(_exit)


def _exit() -> None:
    global _exits
    _exits = True


@contextmanager
def starting_thread() -> Iterator[None]:
    """The context in which to start a thread or use an executor. Raises OperationError if none can start."""
    try:
        yield
    except RuntimeError as error:
        if "can't start new thread" not in str(error):
            raise
        raise OperationError(
            "the system has no room for another thread of this process: raise the limit (ulimit -u, ulimit -v, or "
            "pids.max of its control group), or use fewer workers and threads"
        ) from error
