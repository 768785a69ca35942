"""Owners of system resources: descriptors, locks and threads, each closed exactly once.

Objects that own a resource of the system: a descriptor, map, socket, thread or process. A copy of such an
object would have the same descriptor, and would close the original's, or later another file's.
"""

from __future__ import annotations

import _thread
import atexit
import fcntl
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing.context import get_spawning_popen
from typing import Any, ClassVar, NoReturn, Self, SupportsIndex

from shardprep.formats.errors import NotCopyable, OperationError


class Owned:
    """Base of owners: ``copy`` and ``pickle`` raise NotCopyable before anything is made.

    ``instead`` is the error's advice. An owner stores the process that it was made in. In a forked copy of
    that process it must not be used, and releases nothing.
    """

    instead: ClassVar[str] = "make a new one where it is needed"

    _pid: int

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        owner = super().__new__(cls)
        object.__setattr__(owner, "_pid", os.getpid())  # works for frozen dataclasses, too
        return owner

    @property
    def made_here(self) -> bool:
        """Whether this process made the object, rather than the process it was forked from."""
        return self._pid == os.getpid()

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        """Raise NotCopyable: ``copy`` and ``pickle`` call this first."""
        self._refuse_copying()

    def _refuse_copying(self) -> NoReturn:
        raise not_copyable(self, self.instead)


def not_copyable(owner: object, instead: str) -> NotCopyable:
    """Return the error that names the owner's class, and what to do instead."""
    return NotCopyable(
        f"a {type(owner).__name__} cannot be copied or pickled, because what it owns exists only once; "
        f"{instead}"
    )


class Inheritable(Owned):
    """An owner that a child process inherits: multiprocessing pickles it at the child's start.

    At any other time, pickling raises NotCopyable.
    """

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        """Return ``__reduce__()``. Raises NotCopyable unless this thread is starting a child."""
        if get_spawning_popen() is None:
            self._refuse_copying()
        return self.__reduce__()


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


End = Callable[[], object]

_exits = False
_running: list[End] = []


class CollectedEnd(Owned):
    """Calls ``end`` once: when it is called, when ``owner`` is collected, or when the program ends.

    A collection runs in any thread, at any point, also where that thread has a lock that ``end`` waits for:
    then ``end`` is called in a thread of its own. ``end`` does not refer to the owner.
    """

    def __init__(self, owner: object, end: End) -> None:
        self._end = end
        self._finalizer = weakref.finalize(owner, _collected, end)
        _notice_exit()

    @property
    def is_over(self) -> bool:
        """Whether it was called."""
        return not self._finalizer.alive

    def __call__(self) -> None:
        if self._finalizer.detach():
            self._end()


def _collected(end: End) -> None:
    if _exits:  # in the main thread, after its program
        end()
    else:
        _running.append(end)
        try:
            _thread.start_new_thread(_end, (end,))  # without the locks that threading.Thread takes
        except RuntimeError:
            _running.remove(end)
            raise


def _end(end: End) -> None:
    try:
        end()
    finally:
        _running.remove(end)


def running_ends() -> int:
    """Return how many ends run now, each in a thread of its own."""
    return len(_running)


@cache
def _notice_exit() -> None:
    """Note the exit before finalizers are called, which were registered before."""
    atexit.register(_exit)


def _exit() -> None:
    global _exits
    _exits = True


CANNOT_START = "can't start new thread"  # CPython's message for any reason of the system


@contextmanager
def starting_thread() -> Iterator[None]:
    """The context for starting a thread or using an executor. Raises OperationError if no thread starts."""
    try:
        yield
    except RuntimeError as error:
        if CANNOT_START not in str(error):
            raise
        raise OperationError(
            "the system has no room for another thread of this process: raise the limit (ulimit -u, ulimit -v, or "
            "pids.max of its control group), or use fewer workers and threads"
        ) from error
