"""Objects that own a resource of the system: a descriptor, map, socket, thread or process.

A copy of such an object would have the same descriptor, and would close the original's, or later another
file's.
"""

from __future__ import annotations

import os
from multiprocessing.context import get_spawning_popen
from typing import Any, ClassVar, NoReturn, Self, SupportsIndex

from shardprep.formats.errors import NotCopyable


class Owned:
    """Base of owners: ``copy`` and ``pickle`` raise NotCopyable before anything is made.

    ``instead`` is the error's advice. An owner stores the process that it was made in. In a forked copy of
    that process it must not be used, and releases nothing.
    """

    instead: ClassVar[str] = "make another one where it is needed"

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
        f"a {type(owner).__name__} cannot be copied or pickled, since what it owns exists once; {instead}"
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
