"""Worker processes that import nothing of the user's, leave nothing and never outlive their parent."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from types import TracebackType
from typing import ParamSpec, TypeVar

from .child import Child, ChildDied, ChildLost

P = ParamSpec("P")
T = TypeVar("T")


def usable_cpus() -> int:
    """The CPUs that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return os.cpu_count() or 1


class WorkerPool(Executor):
    """Processes for work that may be killed at any time.

    The standard library's pool does not say whose worker died, fails everybody's work then, and
    leaves semaphores in /dev/shm when it is killed. Here one thread waits for each process: a dead
    one is an error (ChildDied, ChildLost) of its own call, and is replaced. Leaving the context with an
    error (Ctrl-C, a failed job) ends all of them in the middle of what they do.
    """

    def __init__(self, workers: int) -> None:
        self._threads = ThreadPoolExecutor(workers, "shardprep-pool")
        self._lock = threading.Lock()
        self._idle: list[Child] = []
        self._busy: set[Child] = set()
        self._ended = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return self._threads.submit(self._call, fn, *args, **kwargs)

    def _call(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        child = self._taken()
        try:
            value = child.call(fn, *args, **kwargs)
        except (ChildDied, ChildLost):
            self._gone(child)
            raise
        except BaseException:
            self._returned(child)
            raise
        self._returned(child)
        return value

    def _taken(self) -> Child:
        with self._lock:
            if self._ended:
                raise ChildLost("the work was ended")
            child = self._idle.pop() if self._idle else Child()
            self._busy.add(child)
            return child

    def _returned(self, child: Child) -> None:
        with self._lock:
            self._busy.remove(child)
            self._idle.append(child)

    def _gone(self, child: Child) -> None:
        with self._lock:
            self._busy.remove(child)
        child.__exit__()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._threads.shutdown(wait=wait, cancel_futures=cancel_futures)
        with self._lock:
            idle, self._idle = self._idle, []
        for child in idle:
            child.__exit__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            with self._lock:
                self._ended = True
                for child in self._busy:
                    child.kill()
        self.shutdown(wait=True, cancel_futures=True)
