"""Owners of descriptors, locks and anything else to release once, also in forked copies of the process."""

from __future__ import annotations

import _thread
import fcntl
import functools
import os
import sys
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Self, SupportsIndex, TypeVar, overload

from shardprep.formats.errors import NotCopyable, OperationError, UsageError

T = TypeVar("T")


class cached_property(functools.cached_property[T]):  # noqa: N801 - it replaces the standard one
    """``functools.cached_property`` of Python 3.12, for earlier versions.

    These hold one lock for all objects while they compute a value: a process forked in the meantime would
    wait for it forever. Without it, two threads may compute the same value.
    """

    @overload
    def __get__(self, instance: None, owner: type[Any] | None = None) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type[Any] | None = None) -> T: ...

    def __get__(self, instance: object, owner: type[Any] | None = None) -> Any:
        if instance is None:
            return self
        value = vars(instance)[str(self.attrname)] = self.func(instance)
        return value


class Closable:
    """Base of what a context closes at its end."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Owner:
    """Base of owners, which cannot be copied: ``copy`` and ``pickle`` raise NotCopyable at once.

    ``copy_advice`` is the error's advice. In a forked copy of the process that made it, an owner must not be
    used, and releases nothing.
    """

    copy_advice: ClassVar[str] = "make a new one where it is needed"

    _pid: int

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        owner = super().__new__(cls)
        object.__setattr__(owner, "_pid", os.getpid())  # subclasses may be frozen dataclasses
        return owner

    @property
    def was_made_here(self) -> bool:
        """Whether this process made the object, not one that it was forked from."""
        return self._pid == os.getpid()

    def refuse_forked(self, name: str) -> None:
        """Raise UsageError, which calls this ``name``, in a forked copy of the process that made it."""
        if not self.was_made_here:
            raise UsageError(f"this {name} belongs to the process that forked this one; make another")

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        """Raise NotCopyable; ``copy`` and ``pickle`` call this first."""
        raise not_copyable_error(self, self.copy_advice)


def not_copyable_error(owner: object, advice: str) -> NotCopyable:
    return NotCopyable(
        f"a {type(owner).__name__} cannot be copied or pickled, because what it owns exists only once; "
        f"{advice}"
    )


class Descriptor(Owner):
    """A descriptor that is closed once, at the latest by its finalizer, and only in the opening process.

    In a forked copy of that process the number may belong to another file, because a daemon closes all
    inherited descriptors. Closing takes no lock.
    """

    _number = -1
    _is_finalizing = staticmethod(sys.is_finalizing)  # kept when modules are cleared at the program's end

    def __init__(self, number: int) -> None:
        self._number = number

    def fileno(self) -> int:
        """Return the descriptor's number; -1 once it is closed."""
        return self._number

    def close(self) -> None:
        """Close the descriptor, unless this process is a forked copy, or is ending. Idempotent."""
        number, self._number = self._number, -1
        if number >= 0 and not self._is_finalizing() and self.was_made_here:
            os.close(number)

    def __del__(self) -> None:
        if not self._is_finalizing():  # the system closes the descriptor then
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

        Converting a lock is not atomic: another process may hold it in between. Raises OperationError if
        the file system has no locks.
        """
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            fcntl.flock(self.fileno(), kind if wait else kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            return False
        except OSError as error:
            raise OperationError(
                f"cannot be locked ({error.strerror}): mount its file system with locks (Lustre: -o flock), or "
                "choose a folder on another one",
                path=Path(f"/proc/self/fd/{self.fileno()}").readlink(),
            ) from error

    def close(self) -> None:
        """Release the lock, also for copies of the descriptor, and close it. Idempotent."""
        if self.fileno() >= 0 and self.was_made_here:
            with suppress(OSError):  # where there are no locks
                fcntl.flock(self.fileno(), fcntl.LOCK_UN)
        super().close()


class Finalizer(Owner):
    """Calls ``end`` once: when this is called, when ``owner`` is garbage-collected, or at program exit.

    Garbage collection may run in any thread, even one that holds a lock that ``end`` waits for, so it calls
    ``end`` in a new thread. ``end`` must not refer to the owner.
    """

    def __init__(self, owner: object, end: Callable[[], object]) -> None:
        self._end = end
        self._finalizer = weakref.finalize(owner, _end_collected, end)

    @property
    def has_run(self) -> bool:
        return not self._finalizer.alive

    def __call__(self) -> None:
        if self._finalizer.detach():
            self._end()


def _end_collected(end: Callable[[], object]) -> None:
    if threading.main_thread().is_alive():
        _thread.start_new_thread(end, ())  # unlike threading.Thread, it takes no locks
    else:  # at program exit, in the main thread, which threading counts as ended
        end()
