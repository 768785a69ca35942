"""A thread that runs ahead."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from queue import SimpleQueue
from typing import Any

from ...formats.errors import UsageError
from ..passes import end
from .node import Node, Step
from .running import Pass
from .whole import whole

PATIENCE = 5.0  # seconds that a pass that was left gives its source to come back with an item


@dataclass(frozen=True)
class Prefetch(Step):
    """Runs the source in a thread, at most ``items`` items ahead. See :meth:`.Flow.prefetch`.

    The thread ends with the pass: when that is exhausted, closed or dropped, or the interpreter exits; a source
    that does not come back within 5 seconds is left alone. Exceptions come after the items before them.
    """

    source: Node
    items: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "items", whole(self.items, "the number of items to prefetch", least=1))

    @property
    def never_change(self) -> bool:
        return self.source.never_change

    def run(self, now: Pass) -> Iterator[Any]:
        return self._ahead(partial(self.drawn, now))

    @property
    def can_pick(self) -> bool:
        return self.source.can_pick

    def pick(self, now: Pass, numbers: Iterable[int]) -> Iterator[Any]:
        if not self.can_pick:
            return super().pick(now, numbers)
        return self._ahead(partial(self.source.pick, now.of(self), numbers))

    def _ahead(self, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        thread = _Thread(begin, self.items)
        try:
            while found := thread.take():
                yield found.pop()
        finally:
            thread.close()


class _Thread:
    """The consumer's end of it; nothing here is the thread's, so that a pass that is dropped is seen to be."""

    def __init__(self, begin: Callable[[], Iterator[Any]], items: int) -> None:
        self._drawing = _Drawing(begin, items)
        self._pid = os.getpid()
        thread = threading.Thread(target=self._drawing.run, name="shardprep-prefetch", daemon=True)
        self.close = weakref.finalize(self, _end, self._drawing, thread)
        thread.start()

    def take(self) -> list[Any]:
        """A list of the next item, empty at the end. Raises what the source raised."""
        if self._pid != os.getpid():
            raise UsageError(
                "this pass belongs to the process that this one was forked from; begin a new one"
            )
        found = self._drawing.found.get()
        self._drawing.room.put(True)
        if not found:
            self._drawing.raise_error()
        return found


class _Drawing:
    """What the thread does: draw an item for each token in ``room``, and put it into ``found`` in a list.

    The lists are emptied by who takes them, so that nobody else holds an item. One that is empty ends it.
    """

    def __init__(self, begin: Callable[[], Iterator[Any]], items: int) -> None:
        self.room: SimpleQueue[bool] = SimpleQueue()
        self.found: SimpleQueue[list[Any]] = SimpleQueue()
        self.is_left = False
        self._begin = begin
        self._error: BaseException | None = None
        for _ in range(items):
            self.room.put(True)

    def run(self) -> None:
        try:
            items = self._begin()
            try:
                self._draw(items)
            finally:
                end(items)
        except BaseException as error:  # the consumer's to raise, whatever it is
            self._error = error
        self.found.put([])

    def _draw(self, items: Iterator[Any]) -> None:
        while self.room.get() and not self.is_left:
            found = list(islice(items, 1))
            if not found:
                return
            self.found.put(found)

    def raise_error(self) -> None:
        """Raise what ended it, once."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # or else its traceback holds itself


def _end(drawing: _Drawing, thread: threading.Thread) -> None:
    drawing.is_left = True
    drawing.room.put(False)
    if thread.is_alive() and thread is not threading.current_thread():  # where a collector called this
        thread.join(PATIENCE)
