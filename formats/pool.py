"""Worker processes that import nothing of the user's and never outlive their parent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from types import TracebackType
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

SPAWN = multiprocessing.get_context("spawn")

# To hold while starting or joining a process. multiprocessing reaps finished children at both, and
# two threads that do so at once take the exit code from each other.
PROCESS_TABLE = threading.Lock()


def usable_cpus() -> int:
    """The CPUs that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return os.cpu_count() or 1


def become_worker(leash: Connection) -> None:
    """In a worker: leave Ctrl-C to the parent, and end at once when the parent does.

    The parent alone holds the other end of ``leash``, so its end, whatever kills it, is seen here.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_wait_for_end, args=(leash,), daemon=True).start()


def _wait_for_end(leash: Connection) -> None:
    try:
        leash.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)


@contextmanager
def main_module_hidden() -> Iterator[None]:
    """While starting a process: spawn would run the user's script in it, which needs nothing of it."""
    main = sys.modules["__main__"]
    with PROCESS_TABLE:  # two threads at it would hide, and then restore, what the other has hidden
        hidden = {name: getattr(main, name) for name in ("__file__", "__spec__") if hasattr(main, name)}
        for name in hidden:
            setattr(main, name, None)
        try:
            yield
        finally:
            for name, value in hidden.items():
                setattr(main, name, value)


class WorkerPool(ProcessPoolExecutor):
    """A process pool for work that may be killed at any time.

    Leaving its context with an error (Ctrl-C, a failed job) ends the workers at once, in the
    middle of what they do. Raises BrokenExecutor where a worker dies.
    """

    def __init__(self, workers: int) -> None:
        self._leash, end = SPAWN.Pipe()
        self._end = end
        super().__init__(workers, mp_context=SPAWN, initializer=become_worker, initargs=(end,))

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        with main_module_hidden():
            return super().submit(fn, *args, **kwargs)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._leash.close()
        self.shutdown(wait=True, cancel_futures=True)
        self._leash.close()
        self._end.close()
