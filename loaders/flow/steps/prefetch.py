"""A step that runs its source in a thread, ahead of the consumer."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from queue import SimpleQueue
from typing import Any

from shardprep.formats.errors import UsageError
from shardprep.formats.processes.thread_start import starting_thread
from shardprep.formats.system.owned import Owned
from shardprep.loaders.batching.passes import end
from shardprep.loaders.flow.core.checks import checked_int
from shardprep.loaders.flow.core.meter import GroupMeter
from shardprep.loaders.flow.core.node import Node, Step, described
from shardprep.loaders.flow.core.pass_context import PassContext

CLOSE_TIMEOUT_S = 5.0  # the longest wait of a closed pass for its source to return


@dataclass(frozen=True)
class Prefetch(Step):
    """Runs the source in a thread, at most ``items`` items ahead. See :meth:`.Flow.prefetch`.

    The thread ends with the pass: when the pass is exhausted, closed or dropped, or when the interpreter
    exits. A source that does not return within 5 seconds is not waited for. An exception is raised after the
    items before it.
    """

    source: Node
    items: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "items", checked_int(self.items, "the number of items to prefetch", least=1))

    @property
    def label(self) -> str:
        return f"prefetch({self.items})"

    @property
    def description(self) -> str:
        return described(self)

    @property
    def never_change(self) -> bool:
        return self.source.never_change

    def run(self, now: PassContext) -> Iterator[Any]:
        own = self._group(now)
        return self._ahead(now, own, partial(self.source.run, now.of(self, group=own)))

    @property
    def can_pick(self) -> bool:
        return self.source.can_pick

    def pick(self, now: PassContext, numbers: Iterable[int]) -> Iterator[Any]:
        if not self.can_pick:
            return super().pick(now, numbers)
        own = self._group(now)
        return self._ahead(now, own, partial(self.source.pick, now.of(self, group=own), numbers))

    def _group(self, now: PassContext) -> GroupMeter:
        return now.meter.group(now.place(self), partial(GroupMeter, self.label, "thread"))

    def _ahead(self, now: PassContext, own: GroupMeter, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        thread = _Thread(begin, self.items, own)
        take = now.here.timed_wait(thread.take)
        try:
            while found := take():
                yield found.pop()
        finally:
            thread.close()


class _Thread(Owned):
    """The consumer's side. The thread has no reference to it, so that a dropped pass is collected."""

    def __init__(self, begin: Callable[[], Iterator[Any]], items: int, meter: GroupMeter) -> None:
        self._drawing = _Drawing(begin, items, meter)
        thread = threading.Thread(target=self._drawing.run, name="shardprep-prefetch", daemon=True)
        self.close = weakref.finalize(self, _end, self._drawing, thread)
        with starting_thread():
            thread.start()

    def take(self) -> list[Any]:
        """Return a list with the next item, empty at the end. Raises the source's exception."""
        if not self.made_here:
            raise UsageError(
                "this pass belongs to the process that this one was forked from; begin a new one"
            )
        found = self._drawing.found.get()
        self._drawing.tokens.put(True)
        if not found:
            self._drawing.raise_error()
        return found


class _Drawing:
    """The thread's work: draw an item for each of ``tokens``, and put it in a list into ``found``.

    The consumer empties the lists, so that no other reference to an item is left. An empty list is the end.
    """

    def __init__(self, begin: Callable[[], Iterator[Any]], items: int, meter: GroupMeter) -> None:
        self.tokens: SimpleQueue[bool] = SimpleQueue()
        self.found: SimpleQueue[list[Any]] = SimpleQueue()
        self.is_left = False
        self._begin = begin
        self._meter = meter
        self._error: BaseException | None = None
        for _ in range(items):
            self.tokens.put(True)

    def run(self) -> None:
        try:
            items = self._begin()
            try:
                self._draw(items)
            finally:
                end(items)
        except BaseException as error:  # raised in the consumer
            self._error = error
        self.found.put([])

    def _draw(self, items: Iterator[Any]) -> None:
        wait = self._meter.timed_block(self.tokens.get)
        while wait() and not self.is_left:
            found = list(islice(items, 1))
            if not found:
                return
            self.found.put(found)

    def raise_error(self) -> None:
        """Raise the exception that ended the thread, once."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback refers to this frame, which would be a cycle


def _end(drawing: _Drawing, thread: threading.Thread) -> None:
    drawing.is_left = True
    drawing.tokens.put(False)
    # a garbage collection may call this in the thread itself
    if thread.is_alive() and thread is not threading.current_thread():
        thread.join(CLOSE_TIMEOUT_S)
