"""The end of an object that was dropped without being closed."""

from __future__ import annotations

import _thread
import atexit
import weakref
from collections.abc import Callable
from functools import cache

from shardprep.formats.system.owned import Owned

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
