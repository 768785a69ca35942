"""Worker processes that do not import the user's main module and never outlive their parent."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from types import TracebackType
from typing import ParamSpec, TypeVar

from shardprep.formats.errors import WorkerDied
from shardprep.formats.system.owned import Owned

from .child_process import START_TIMEOUT_S, Child, ChildDied, ChildLost
from .thread_start import starting_thread

P = ParamSpec("P")
T = TypeVar("T")


def usable_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return os.cpu_count() or 1


class WorkerPool(Owned, Executor):
    """Processes for work that may be killed at any time.

    When a worker dies, the standard library's pool fails all calls and does not say which one it was at;
    when the pool is killed, it leaves semaphores in /dev/shm. Here one thread waits for each process. The
    death of a process is an error (ChildDied, ChildLost) of its own call, and the process is replaced. A
    process that is not ready within ``start_timeout`` seconds, twice, is WorkerDied. Leaving the context with
    an error (Ctrl-C, a failed job) kills all processes. Raises OperationError if the system allows no further
    thread or process.
    """

    def __init__(self, workers: int, *, start_timeout: float = START_TIMEOUT_S) -> None:
        self._start_timeout = start_timeout
        self._threads = ThreadPoolExecutor(workers, "shardprep-pool")
        self._lock = threading.Lock()
        self._idle: list[Child] = []
        self._busy: set[Child] = set()
        self._ended = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        with starting_thread():
            return self._threads.submit(self._call, fn, *args, **kwargs)

    def _call(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        child = self._taken()
        try:
            value = child.call(fn, *args, **kwargs)
        except (ChildDied, ChildLost, WorkerDied):
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
            child = self._idle.pop() if self._idle else Child(start_timeout=self._start_timeout)
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
        if not self.made_here:  # a forked copy has no threads, and one may have held the lock
            return
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
        if kind is not None and self.made_here:
            self._threads.shutdown(wait=False, cancel_futures=True)
            with self._lock:
                self._ended = True
                for child in self._busy:
                    child.kill()
        self.shutdown(wait=True, cancel_futures=True)
