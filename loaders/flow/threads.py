"""Steps in threads: functions of each item, and a source that is drawn from ahead of the consumer."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import KW_ONLY, dataclass
from functools import partial
from itertools import islice
from queue import Empty, SimpleQueue
from time import monotonic, perf_counter
from typing import Any, TypeVar

from shardprep.formats.errors import UsageError
from shardprep.formats.runtime.owned import Owned, starting_thread
from shardprep.loaders.batches.passes import end, ending
from shardprep.loaders.flow.map import Mapped
from shardprep.loaders.flow.node import InPlace, Node, numbered
from shardprep.loaders.flow.passes import PassContext
from shardprep.loaders.loader.stats import GroupTimes

PASS_END_TIMEOUT_S = 5.0  # the longest wait of a closed pass for its threads

T = TypeVar("T")

WINDOW = 16  # most unfinished items for each thread, so that other items need not wait for a slow one


class Task:
    """A call ``make(item)`` for a thread, which puts the task into ``finished`` after the call.

    The task has the only reference to the item, and then to the outcome, which :meth:`outcome` passes on.
    ``seconds`` is how long the call took.
    """

    def __init__(self, make: Callable[[Any], Any], item: Any, finished: FinishedTasks) -> None:
        self.finished = finished
        self._make = make
        self._held = [item]
        self._failed: list[BaseException] = []
        self.seconds = 0.0

    def run(self) -> None:
        began = perf_counter()
        try:
            self._held.append(self._make(self._held.pop()))
        except BaseException as error:  # raised in the consumer
            self._failed.append(error)
        self.seconds = perf_counter() - began
        self.finished.put(self)

    def outcome(self) -> Any:
        """Return the call's result, or raise its exception. Callable once."""
        if self._failed:
            raise self._failed.pop()  # no variable of this frame, to which the traceback refers, has it
        return self._held.pop()


FinishedTasks = SimpleQueue[Task]


class Threads(Owned):
    """``count`` threads of a pass. Each runs ``serve``, which returns soon after ``leave`` was called.

    ``close`` calls ``leave``, and waits at most PASS_END_TIMEOUT_S for the threads: a garbage collection may
    call it while this thread holds a lock that one of them waits for. The interpreter's exit calls it, too.
    ``serve`` and ``leave`` must not refer to this object, so that a dropped pass is collected.
    """

    def __init__(self, count: int, name: str, serve: Callable[[], None], leave: Callable[[], None]) -> None:
        threads = [
            threading.Thread(target=serve, name=f"shardprep-{name}-{number}", daemon=True)
            for number in range(count)
        ]
        self.close = weakref.finalize(self, _end, leave, threads)
        try:
            for thread in threads:
                with starting_thread():
                    thread.start()
        except BaseException:
            self.close()
            raise

    def next_of(self, made: SimpleQueue[T]) -> T:
        """Wait for the next result that the threads put into ``made``, and return it."""
        if not self.made_here:
            raise UsageError(
                "this pass belongs to the process that this one was forked from; begin a new one"
            )
        return made.get()


def _end(leave: Callable[[], None], threads: Sequence[threading.Thread]) -> None:
    leave()
    until = monotonic() + PASS_END_TIMEOUT_S
    for thread in threads:
        # a garbage collection may call this in one of the threads
        if thread.is_alive() and thread is not threading.current_thread():
            thread.join(max(0.0, until - monotonic()))


def _serve(tasks: SimpleQueue[Task | None]) -> None:
    for task in iter(tasks.get, None):
        task.run()


def _leave(tasks: SimpleQueue[Task | None], threads: int) -> None:
    """Drop the tasks that have not begun."""
    with suppress(Empty):
        while True:
            tasks.get_nowait()
    for _ in range(threads):
        tasks.put(None)


@dataclass(frozen=True)
class ThreadMap(Mapped):
    """As :class:`.Map`, in several threads.

    The consumer's thread draws from the source: one item for each result, and more while no result is ready,
    up to 16 for each thread. An exception of the source is raised after the results of the items before it.

    A pass that ends for any reason makes no further calls and waits for those that run, so that no thread
    outlives the pass; a call that takes longer than 5 seconds is not waited for.
    """

    _: KW_ONLY
    threads: int

    def results(self, now: PassContext, numbers: Iterable[int] | None = None) -> Iterator[Any]:
        items, places = numbered(self, now, numbers)
        tasks, shared = SimpleQueue[Task | None](), FinishedTasks()
        threads = Threads(self.threads, "map", partial(_serve, tasks), partial(_leave, tasks, self.threads))
        wait = now.here.waiting("starved", threads.next_of)
        own = now.meter.group(now.place(self), partial(GroupTimes, self.label, "thread", self.threads))

        def begin(item: Any, number: int) -> FinishedTasks:
            task = Task(partial(self.result, now, number), item, FinishedTasks() if self.ordered else shared)
            tasks.put(task)
            return task.finished

        def outcome(finished: FinishedTasks) -> Any:
            task = wait(finished)
            own.count(self.label, task.seconds)
            return task.outcome()

        try:
            due = _due(map(begin, items, places), WINDOW * self.threads)
            yield from self.wanted(map(outcome, due))
        finally:
            threads.close()
            end(items)


def _due(begun: Iterator[FinishedTasks], window: int) -> Iterator[FinishedTasks]:
    """Yield the queue to wait for next. Tasks are begun ahead of it, until its own has finished."""
    pending: deque[FinishedTasks] = deque()
    failed: list[Exception] = []
    while True:
        try:
            for finished in begun:
                pending.append(finished)
                if not pending[0].empty() or len(pending) == window:
                    break
            else:
                begun = iter(())
        except Exception as error:
            begun, failed = iter(()), [error]
        if not pending:
            break
        yield pending.popleft()
    if failed:
        raise failed.pop()


@dataclass(frozen=True)
class Prefetch(InPlace):
    """Runs the source in a thread, at most ``items`` items ahead. See :meth:`.Flow.prefetch`.

    The thread ends with the pass: when the pass is exhausted, closed or dropped, or when the interpreter
    exits. A source that does not return within 5 seconds is not waited for. An exception is raised after the
    items before it.
    """

    source: Node
    items: int

    title = "prefetch({0.items})"
    facts = ""

    def results(self, now: PassContext, numbers: Iterable[int] | None = None) -> Iterator[Any]:
        own = now.meter.group(now.place(self), partial(GroupTimes, self.label, "thread"))
        there = now.of(self, group=own)
        begin = partial(self.source.run, there)
        if numbers is not None:
            begin = partial(self.source.pick, there, numbers)
        drawing = _Drawer(begin, self.items, own)
        with closing(Threads(1, "prefetch", drawing.run, drawing.leave)) as thread:
            wait = now.here.waiting("starved", thread.next_of)
            while found := wait(drawing.found):
                drawing.tokens.put(True)
                yield found.pop()
            if drawing.failed:
                raise drawing.failed.pop()


class _Drawer:
    """The thread's work: draw an item for each of ``tokens``, and put it in a list into ``found``.

    The consumer empties the lists, so that no other reference to an item is left. An empty list is the end.
    """

    def __init__(self, begin: Callable[[], Iterator[Any]], items: int, meter: GroupTimes) -> None:
        self.tokens: SimpleQueue[bool] = SimpleQueue()
        self.found: SimpleQueue[list[Any]] = SimpleQueue()
        self._is_left = False
        self._begin = begin
        self._meter = meter
        self.failed: list[BaseException] = []
        for _ in range(items):
            self.tokens.put(True)

    def run(self) -> None:
        wait = self._meter.waiting("blocked", self.tokens.get)
        try:
            with ending(self._begin()) as items:
                while wait() and not self._is_left and (found := list(islice(items, 1))):
                    self.found.put(found)
        except BaseException as error:  # raised in the consumer
            self.failed.append(error)
        self.found.put([])

    def leave(self) -> None:
        """Make the thread return after the item that it draws."""
        self._is_left = True
        self.tokens.put(False)
