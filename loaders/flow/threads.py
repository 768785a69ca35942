"""Steps in threads: functions of each item, and a source that runs ahead of the consumer."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import KW_ONLY, dataclass
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic, perf_counter
from typing import Any

from shardprep.formats.errors import UsageError
from shardprep.formats.runtime.owned import Owned, starting_thread
from shardprep.loaders.batches.passes import end, ending
from shardprep.loaders.flow.map import Mapped
from shardprep.loaders.flow.node import InPlace, Node, numbered
from shardprep.loaders.flow.passes import PassContext
from shardprep.loaders.loader.stats import GroupTimes

PASS_END_TIMEOUT_S = 5.0  # for a closed pass to wait for its threads

WINDOW = 16  # unfinished items per thread, so that a slow item does not delay the others


class Task:
    """A call ``make(item)`` for a thread, which then puts the task into ``finished``.

    The task has the only reference to the item and, later, to the outcome.
    """

    def __init__(self, make: Callable[[Any], Any], item: Any, finished: Tasks) -> None:
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
            raise self._failed.pop()  # popped, because the traceback refers to this frame's variables
        return self._held.pop()


Tasks = SimpleQueue[Task]
Ended = SimpleQueue[Task | None]  # None ends a thread


def run_all(tasks: Ended) -> None:
    for task in iter(tasks.get, None):
        task.run()


class Threads(Owned):
    """``count`` threads of a pass that ``serve`` its ``tasks``, by default with :func:`run_all`.

    ``close`` drops pending tasks, and waits at most PASS_END_TIMEOUT_S for the threads: garbage collection
    may call it while this thread holds a lock that one of them waits for. ``serve`` must not refer to this
    object, so that a dropped pass can be collected.
    """

    def __init__(self, count: int, name: str, serve: Callable[[Ended], None] = run_all) -> None:
        self.tasks = Ended()
        threads = [
            threading.Thread(target=serve, args=(self.tasks,), name=f"shardprep-{name}-{number}", daemon=True)
            for number in range(count)
        ]
        self.close = weakref.finalize(self, _end, self.tasks, threads)
        try:
            for thread in threads:
                with starting_thread():
                    thread.start()
        except BaseException:
            self.close()
            raise

    def next_of(self, finished: Tasks) -> Task:
        if not self.made_here:
            raise UsageError(
                "this pass belongs to the process that this one was forked from; begin a new one"
            )
        return finished.get()


def _end(tasks: Ended, threads: Sequence[threading.Thread]) -> None:
    with suppress(Empty):
        while True:
            tasks.get_nowait()
    for _ in threads:
        tasks.put(None)
    until = monotonic() + PASS_END_TIMEOUT_S
    for thread in threads:
        # garbage collection may call this in one of the threads
        if thread.is_alive() and thread is not threading.current_thread():
            thread.join(max(0.0, until - monotonic()))


@dataclass(frozen=True)
class ThreadMap(Mapped):
    """Like :class:`.Map`, in several threads. The consumer's thread draws from the source.

    It draws one item per result, and more while no result is ready, up to WINDOW per thread. An exception in
    the source is raised after the results before it.
    """

    _: KW_ONLY
    threads: int

    def results(self, now: PassContext, numbers: Iterable[int] | None = None) -> Iterator[Any]:
        items, places = numbered(self, now, numbers)
        threads, shared = Threads(self.threads, "map"), Tasks()
        wait = now.here.waiting("starved", threads.next_of)
        own = now.meter.group(now.place(self), GroupTimes(self.label, "thread", self.threads))

        def begin(item: Any, number: int) -> Tasks:
            task = Task(partial(self.result, now, number), item, Tasks() if self.ordered else shared)
            threads.tasks.put(task)
            return task.finished

        def outcome(finished: Tasks) -> Any:
            task = wait(finished)
            own.count(self.label, task.seconds)
            return task.outcome()

        try:
            due = _due(map(begin, items, places), WINDOW * self.threads)
            yield from self.wanted(map(outcome, due))
        finally:
            threads.close()
            end(items)


def _due(begun: Iterator[Tasks], window: int) -> Iterator[Tasks]:
    """Yield the queue to wait for next, beginning further tasks until its own has finished."""
    pending: deque[Tasks] = deque()
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
    """Runs the source in a thread, at most ``items`` items ahead. See :meth:`.Flow.prefetch`."""

    source: Node
    items: int

    title = "prefetch({0.items})"
    facts = ""

    def results(self, now: PassContext, numbers: Iterable[int] | None = None) -> Iterator[Any]:
        own = now.meter.group(now.place(self), GroupTimes(self.label, "thread"))
        there = now.of(self, group=own)
        items = self.source.run(there) if numbers is None else self.source.pick(there, numbers)

        def serve(tasks: Ended) -> None:
            with ending(items):
                for task in iter(own.waiting("blocked", tasks.get), None):
                    task.run()

        with closing(Threads(1, "prefetch", serve)) as thread, suppress(StopIteration):
            finished, wait = Tasks(), now.here.waiting("starved", thread.next_of)
            for _ in range(self.items):
                thread.tasks.put(Task(next, items, finished))
            while True:
                task = wait(finished)
                thread.tasks.put(Task(next, items, finished))
                yield task.outcome()
