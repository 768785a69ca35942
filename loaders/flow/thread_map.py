"""Functions of each item, called in threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

from ..passes import end
from .mapped import Mapped
from .numbered import numbered
from .running import Pass
from .threads import Finished, Task, Threads
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
        threads, shared = Threads(self.threads, "map"), Finished()

        def begin(item: Any, number: int) -> Finished:
            task = Task(partial(self.result, now, number), item, Finished() if self.ordered else shared)
            threads.do(task)
            return task.finished

        try:
            due = _due(map(begin, items, places), WINDOW * self.threads)
            yield from self.wanted(map(threads.outcome, due))
        finally:
            threads.close()
            end(items)


def _due(begun: Iterator[Finished], window: int) -> Iterator[Finished]:
    """What will be waited for next, while others are begun."""
    line: deque[Finished] = deque()
    failure: Exception | None = None
    more = True
    while more or line:
        try:
            more = more and _begin_some(begun, line, window)
        except Exception as error:
            failure, more = error, False
        if line:
            yield line.popleft()
    try:
        if failure is not None:
            raise failure
    finally:
        del failure  # or else its traceback holds itself


def _begin_some(begun: Iterator[Finished], line: deque[Finished], window: int) -> bool:
    """Begin one more, and others while the first of the line would have to be waited for. False at the end."""
    for finished in begun:
        line.append(finished)
        if not line[0].empty() or len(line) == window:
            return True
    return False
