"""Passes that TensorFlow's own threads pull from, each by its number."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.util import Finalize
from typing import Any

from ...formats.errors import UsageError
from ..passes import Passes, end
from .failures import Failure, original_of

PATIENCE = 5.0  # seconds for who is pulling to come back


class PulledPasses:
    """Begins a pass and gives its batches to whoever names it; beginning another ends it.

    Thread-safe. Closed when it is dropped and when the interpreter ends, so that no thread of TensorFlow's is
    in Python then.
    """

    def __init__(self, passes: Passes) -> None:
        self._shelf = _Shelf(passes)
        self.close = Finalize(self, self._shelf.close, exitpriority=15)
        self._failures: deque[Failure] = deque(maxlen=2)

    @property
    def batches_never_change(self) -> bool:
        """What the source promises."""
        return self._shelf.passes.batches_never_change

    def begin(self) -> int:
        """Begin a pass; its number. Raises UsageError once this is closed, and what the source raises."""
        return self._shelf.begin()

    def next(self, number: int) -> Any:
        """The next batch of that pass, None at its end. Raises UsageError once another was begun."""
        return self._shelf.next(number)

    def begin_for_tensorflow(self) -> int:
        """The same, with errors for :func:`original_errors`."""
        return int(self._telling(self._shelf.begin))

    def next_for_tensorflow(self, number: int, made_of: Callable[[Any], Any]) -> Any:
        """What ``made_of`` makes of it, with errors for :func:`original_errors`."""
        return self._telling(partial(self._made, number, made_of))

    def _made(self, number: int, made_of: Callable[[Any], Any]) -> Any:
        batch = self._shelf.next(number)
        return None if batch is None else made_of(batch)

    def _telling(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except BaseException as error:  # TensorFlow would make text of it
            failure = Failure(original_of(error) or error)
            self._failures.append(failure)
            raise failure.stand_in() from error


class _Shelf:
    """What the finalizer closes."""

    def __init__(self, passes: Passes) -> None:
        self.passes = passes
        self._changed = threading.Condition()
        self._number = 0
        self._batches: Iterator[Any] = iter(())
        self._pulling = 0
        self._closed = False

    def is_current(self, number: int) -> bool:
        return number == self._number and not self._closed

    def begin(self) -> int:
        with self._changed:
            self._check_open()
            self._number += 1
            number = self._number
            before, self._batches = self._batches, iter(())
            if not self._pulling:  # who is pulling ends it himself
                end(before)
        batches = self.passes.begin()
        with self._changed:
            if number == self._number:
                self._batches = batches
        return number

    def next(self, number: int) -> Any:
        batches = self._enter(number)
        try:
            batch = next(batches, None)
        finally:
            with self._changed:
                if not self.is_current(number):
                    end(batches)
                self._pulling -= 1
                self._changed.notify_all()
        self._check(number)
        return batch

    def _enter(self, number: int) -> Iterator[Any]:
        with self._changed:
            self._check(number)
            self._pulling += 1
            return self._batches

    def _check(self, number: int) -> None:
        self._check_open()
        if number != self._number:
            raise UsageError("another iteration of this input has begun; end the first, or use two inputs")

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this input is closed; make a new one")

    def close(self) -> None:
        """Give out nothing more, and wait until nobody is here."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._pulling, PATIENCE)
            if not self._pulling:
                end(self._batches)
                self.passes.close()
