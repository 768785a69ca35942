"""What is done again and again while a batch is waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import TypeVar

from shardprep.formats.processes.thread_start import starting_thread
from shardprep.formats.system.owned import Owned

from .status import WINDOW_S

T = TypeVar("T")


class Waiting(Owned):
    """A thread that calls ``again`` every ``every_s`` seconds as long as the next item is waited for.

    While the program is at its own work the thread does nothing, so that a fork there copies no lock that it
    holds. It is a daemon, and ends with :meth:`close`.
    """

    def __init__(self, again: Callable[[], object], *, every_s: float = WINDOW_S) -> None:
        self._again, self._every_s = again, every_s
        self._since: float | None = None
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="shardprep-watch", daemon=True)
        with starting_thread():
            self._thread.start()

    def over(self, items: Iterator[T]) -> Iterator[T]:
        """Return an iterator of the items, in which the thread sees the waits; it holds no item."""
        return _Awaited(items, self.note)

    def note(self, since: float | None) -> None:
        """Note since when an item is waited for; None: it is not. Then the thread is within no call."""
        with self._changed:
            self._since = since

    def _run(self) -> None:
        with self._changed:
            while not self._is_closed:
                self._changed.wait(self._every_s)
                if self._since is not None and perf_counter() - self._since >= self._every_s:
                    self._again()

    def close(self) -> None:
        """End the thread. Idempotent."""
        if not self.made_here:
            return
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()


class _Awaited(Iterator[T]):
    """The items of an iterator, with a note before and after the wait for each."""

    def __init__(self, items: Iterator[T], note: Callable[[float | None], None]) -> None:
        self._items, self._note = items, note

    def __next__(self) -> T:
        self._note(perf_counter())
        try:
            return next(self._items)
        finally:
            self._note(None)
