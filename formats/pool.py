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
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

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
def starting_process(*, main_visible: bool = False) -> Iterator[None]:
    """Hold this while a process is spawned, from any thread.

    Unless ``main_visible``, the child does not import the main module: a user's script would run
    again in it. SIGINT is blocked in the child from its first instruction on: Ctrl-C reaches all of a
    terminal's processes, also one that is only importing, and would be a traceback there.
    """
    resource_tracker.ensure_running()  # its own start would unblock the signal again
    with PROCESS_TABLE, _sigint_blocked(), _main_module(visible=main_visible):
        yield


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextmanager
def _main_module(*, visible: bool) -> Iterator[None]:
    names = vars(sys.modules["__main__"])
    known: dict[str, Any] = {name: names[name] for name in ("__file__", "__spec__") if name in names}
    if not visible:
        names.update(__file__=None, __spec__=None)
    try:
        yield
    finally:
        if not visible:
            del names["__file__"], names["__spec__"]
            names.update(known)


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
        with starting_process():
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
