"""Passes that TensorFlow's threads pull from, each by its number."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.util import Finalize
from typing import Any

from shardprep.formats.errors import UsageError
from shardprep.formats.system.owned import Owned
from shardprep.loaders.batching.passes import Passes, end

from .closing import lock_for_closing
from .errors import SourceFailure, original_of

CLOSE_TIMEOUT_S = 5.0  # the longest wait for the threads that are pulling


class PulledPasses(Owned):
    """Passes of which one at a time is current; its batches are pulled by its number.

    Beginning a pass ends the one before. Thread-safe. Closed when it is dropped and when the interpreter
    ends, so that no thread of TensorFlow's runs Python code then.
    """

    def __init__(self, passes: Passes) -> None:
        self._current = _CurrentPass(passes)
        self.close = Finalize(self, self._current.close, exitpriority=15)
        self._failures: deque[SourceFailure] = deque(maxlen=2)

    @property
    def batches_never_change(self) -> bool:
        """Whether the source never changes its batches after it has delivered them."""
        return self._current.passes.batches_never_change

    def begin(self) -> int:
        """Begin a pass and return its number. Raises UsageError after close(), and the source's errors."""
        return self._current.begin()

    def next(self, number: int) -> Any:
        """Return the next batch of that pass, None at its end. Raises UsageError once another was begun."""
        return self._current.next(number)

    def begin_for_tensorflow(self) -> int:
        """As :meth:`begin`, with errors for :func:`original_errors`."""
        return int(self._reporting(self._current.begin))

    def next_for_tensorflow(self, number: int, made_of: Callable[[Any], Any]) -> Any:
        """Return ``made_of`` of the next batch, None at the end, with errors for :func:`original_errors`."""
        return self._reporting(partial(self._made, number, made_of))

    def _made(self, number: int, made_of: Callable[[Any], Any]) -> Any:
        batch = self._current.next(number)
        return None if batch is None else made_of(batch)

    def _reporting(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except BaseException as error:  # TensorFlow would keep its text only
            failure = SourceFailure(original_of(error) or error)
            self._failures.append(failure)
            raise failure.as_input_failed() from error


class _CurrentPass(Owned):
    """The current pass, which the finalizer closes."""

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
            if not self._pulling:  # otherwise the pulling thread ends it
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
        """Refuse new calls, and wait some seconds for running ones. A garbage collection may call it."""
        if not self.made_here:
            return
        with lock_for_closing(self._changed) as is_held:
            self._closed = True
            if is_held and self._changed.wait_for(lambda: not self._pulling, CLOSE_TIMEOUT_S):
                end(self._batches)
                self.passes.close()
