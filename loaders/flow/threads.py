"""Calls in threads that end with the pass."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from ...formats.errors import UsageError


class Finished(SimpleQueue["Task"]):
    """Where a task is put when it has been done."""


class Task:
    """``make(item)``, to be called by a thread, which then puts the task into ``finished``.

    Nobody else holds the item meanwhile, nor the outcome afterwards: whoever takes it has it alone.
    """

    def __init__(self, make: Callable[[Any], Any], item: Any, finished: Finished) -> None:
        self.finished = finished
        self._make = make
        self._held = [item]
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._held.append(self._make(self._held.pop()))
        except BaseException as error:  # the consumer's to raise, whatever it is
            self._error = error
        self.finished.put(self)

    def outcome(self) -> Any:
        """What was returned; raises what was raised. Once."""
        if self._error is None:
            return self._held.pop()
        error, self._error = self._error, None
        try:
            raise error
        finally:
            del error  # or else its traceback holds itself


class Threads:
    """So many threads, which run tasks in the order in which they are given, until they are closed.

    ``close`` drops the tasks that have not begun and waits for those that run; it is called at the latest when
    the interpreter exits. Idempotent.
    """

    def __init__(self, count: int, name: str) -> None:
        self._pid = os.getpid()
        self._todo: SimpleQueue[Task | None] = SimpleQueue()
        threads = [
            threading.Thread(
                target=_serve, args=(self._todo,), name=f"shardprep-{name}-{number}", daemon=True
            )
            for number in range(count)
        ]
        self.close = weakref.finalize(self, _end, self._todo, threads)
        for thread in threads:
            thread.start()

    def do(self, task: Task) -> None:
        self._todo.put(task)

    def outcome(self, finished: Finished) -> Any:
        """Of the task that is, or will be, in there."""
        if self._pid != os.getpid():
            raise UsageError(
                "this pass belongs to the process that this one was forked from; begin a new one"
            )
        return finished.get().outcome()


def _serve(todo: SimpleQueue[Task | None]) -> None:
    for task in iter(todo.get, None):
        task.run()


def _end(todo: SimpleQueue[Task | None], threads: Sequence[threading.Thread]) -> None:
    with suppress(Empty):
        while True:
            todo.get_nowait()
    for _ in threads:
        todo.put(None)
    for thread in threads:
        if thread.is_alive() and thread is not threading.current_thread():  # where a collector called this
            thread.join()
