"""Functions of each item, called in threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

from ..passes import end
from .mapped import Mapped
from .numbered import numbered
from .running import Pass
from .threads import Task, Threads
from .whole import whole

WINDOW = 16  # items of each thread that are under way at most, so that as many need not wait for a slow one


@dataclass(frozen=True)
class ThreadMap(Mapped):
    """As :class:`.Map`, in several threads.

    The source is drawn from where this step is: an item for each result, and more while there is none to be
    had, up to 16 for each thread. ``ordered=False`` yields results as they come. What the source raises comes
    after the results of the items before it.

    A pass that ends, by whatever means, calls the function for no more items and waits for the calls that run:
    no thread outlives it.
    """

    _: KW_ONLY
    threads: int
    ordered: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        whole(self.threads, "threads", least=1)

    @property
    def can_pick(self) -> bool:
        return self.ordered and super().can_pick

    def results(self, now: Pass, numbers: Iterable[int] | None = None) -> Iterator[Any]:
        items, places = numbered(self, now, numbers)
        shared: SimpleQueue[Task] = SimpleQueue()
        threads = Threads(self.threads, "map")

        def begin(item: Any, number: int) -> SimpleQueue[Task]:
            finished: SimpleQueue[Task] = SimpleQueue() if self.ordered else shared
            threads.do(Task(partial(self.result, now, number), item, finished))
            return finished

        try:
            yield from self.wanted(_outcomes(map(begin, items, places), WINDOW * self.threads))
        finally:
            threads.close()
            end(items)


def _outcomes(begun: Iterator[SimpleQueue[Task]], window: int) -> Iterator[Any]:
    """The outcome of each task that was begun, from the queue that it will be in."""
    line: deque[SimpleQueue[Task]] = deque()
    failure: Exception | None = None
    more = True
    while more or line:
        try:
            more = more and _begin_some(begun, line, window)
        except Exception as error:
            failure, more = error, False
        if line:
            yield line.popleft().get().outcome()
    try:
        if failure:
            raise failure
    finally:
        del failure  # or else its traceback holds itself


def _begin_some(begun: Iterator[SimpleQueue[Task]], line: deque[SimpleQueue[Task]], window: int) -> bool:
    """Begin one more, and others while the first of the line would have to be waited for. False at the end."""
    for finished in begun:
        line.append(finished)
        if not line[0].empty() or len(line) == window:
            return True
    return False
