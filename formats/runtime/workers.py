"""Child processes that make calls, alone or as a pool: a crash of the process is an error of its call."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from multiprocessing.reduction import ForkingPickler
from time import monotonic
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from shardprep.formats.errors import OperationError, ShardDamaged, WorkerDied
from shardprep.formats.runtime.owned import Owned
from shardprep.formats.runtime.processes import Channel, SpawnedProcess, keep_freed_memory

P = ParamSpec("P")
T = TypeVar("T")

START_TIMEOUT_S = 120.0  # until a child is ready: imports from a slow network disk take a minute
EXIT_TIMEOUT_S = 1.0  # for a child that closed its channel
KEPT_BYTES = 256 << 20  # of freed memory, reused for the next call's shard

# Signals of a library that crashes on a damaged file. Any other signal comes from outside.
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)


class ChildDied(ShardDamaged):
    """The call crashed its process with ``signal``."""

    signal = ""


class ChildLost(OperationError):
    """The process of a call was killed, exited or timed out, which says nothing about the data."""


class Child(Owned, AbstractContextManager["Child"]):
    """A spawned process that makes picklable calls, one at a time.

    Not thread-safe, except for :meth:`kill`. Its exit is noticed even if a process it forked still runs. It
    ends when its parent does, and leaves nothing behind. Raises WorkerDied if it is not ready within
    START_TIMEOUT_S.
    """

    def __init__(self) -> None:
        self._is_ready = False
        self._process = SpawnedProcess(_serve)

    def call(self, seconds: float | None, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the call's result, or raise its error; ChildDied or ChildLost if the process ends.

        Raises ChildLost after ``seconds``, which begin once the process is ready; None waits without end.
        """
        if not self._is_ready:
            if self._answer(START_TIMEOUT_S) is None:
                raise not_ready(START_TIMEOUT_S)
            self._is_ready = True
        self._process.channel.post(ForkingPickler.dumps((call, args, kwargs)))
        answer = self._answer(math.inf if seconds is None else seconds)
        if answer is None:
            raise ChildLost(f"no answer within {seconds:.0f} seconds")
        failed, value = ForkingPickler.loads(answer)
        if failed:
            raise value
        return value  # type: ignore[no-any-return]

    def _answer(self, seconds: float) -> bytes | None:
        """Return the next message, None on timeout. Raises ChildDied or ChildLost if the process ends."""
        process, until = self._process, monotonic() + seconds
        while True:
            has_exited = process.has_exited()  # checked first, so messages sent before the exit are received
            try:
                is_sent = process.channel.flush()
                for message in process.channel.arrived():
                    return message
            except OSError:  # it closed the channel while the call was being sent
                has_exited = True
            if has_exited or process.channel.ended:
                raise self._ended()
            if (left := until - monotonic()) <= 0:
                return None
            process.wait_for_news(left, to_send=not is_sent)

    def _ended(self) -> ChildDied | ChildLost:
        code = self._process.end(EXIT_TIMEOUT_S)
        if code is None:
            return ChildLost(
                "the process that worked on it ended; the program itself has collected its exit code"
            )
        if -code in CRASHES:
            died = ChildDied(f"the library that reads it crashed ({signal.Signals(-code).name})")
            died.signal = signal.Signals(-code).name
            return died
        if code < 0:
            hint = "; out of memory?" if -code == signal.SIGKILL else ""
            return ChildLost(f"the process that worked on it was killed by signal {-code}{hint}")
        return ChildLost(f"the process that worked on it exited with {code}")

    def kill(self) -> None:
        """Kill the process. Thread-safe."""
        self._process.kill()

    def __exit__(self, *exc: object) -> None:
        self._process.end(0)


def isolated(seconds: float, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Make a call in a new process, like :meth:`Child.call`. Thread-safe."""
    with Child() as child:
        return child.call(seconds, call, *args, **kwargs)


def not_ready(seconds: float) -> WorkerDied:
    """Return the error for a process that did not become ready in time."""
    return WorkerDied(
        f"a worker process was not ready within {seconds:g} s, and was killed: check whether it hangs "
        "in an import (a network disk, a lock), is stopped (SIGSTOP, a debugger, a frozen control "
        "group) or lacks CPU or memory"
    )


def _serve(channel: Channel) -> None:
    """Run in the child: report that it is ready, then serve calls until the channel ends."""
    keep_freed_memory(KEPT_BYTES)
    answer: tuple[bool, Any] = (False, None)
    while _send_answer(channel, answer) and (question := channel.receive()) is not None:
        call, args, kwargs = ForkingPickler.loads(question)
        try:
            answer = (False, call(*args, **kwargs))
        except Exception as error:  # the parent raises it
            answer = (True, error)


def _send_answer(channel: Channel, answer: tuple[bool, Any]) -> bool:
    """Send the answer; return False if the parent is gone, which may happen while this process is stopped."""
    message = ForkingPickler.dumps(answer)
    try:
        channel.send(message)
    except ConnectionError:
        return False
    return True


def usable_cpus() -> int:
    return len(os.sched_getaffinity(0))


class WorkerPool(Owned, Executor):
    """A process pool whose processes may die at any time.

    The death of a process is an error (ChildDied, ChildLost) of its own call only, and the process is
    replaced; one thread waits for each process. In the standard library's pool, one death fails all calls
    without saying which call caused it, and killing the pool leaves semaphores in /dev/shm.

    A process that is not ready within START_TIMEOUT_S raises WorkerDied. Leaving the context with an
    error (Ctrl-C, a failed job) kills all processes. Raises OperationError if the system allows no further
    process.
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
        return self.call_within(None, None, fn, *args, **kwargs)

    def call_within(
        self,
        seconds: float | None,
        is_clean: Callable[[T], bool] | None,
        fn: Callable[P, T],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Make a call with a time limit, and block this thread until it is done.

        With ``is_clean``, a process whose call fails, or returns a value that is not clean, is not reused.
        Raises ChildDied, and ChildLost also on timeout.
        """
        with self._lock:
            if self._ended:
                raise ChildLost("the work was ended")
            child = self._idle.pop() if self._idle else Child()
            self._busy.add(child)
        is_kept = is_clean is None
        try:
            value = child.call(seconds, fn, *args, **kwargs)
            is_kept = is_clean is None or is_clean(value)
            return value
        except (ChildDied, ChildLost, WorkerDied):
            is_kept = False
            raise
        finally:
            with self._lock:
                self._busy.remove(child)
                if is_kept:
                    self._idle.append(child)
            if not is_kept:
                child.__exit__()

    def kill(self) -> None:
        """Kill the busy processes; later calls raise ChildLost. Thread-safe."""
        with self._lock:
            self._ended = True
            for child in self._busy:
                child.kill()

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
            self.kill()
        self.shutdown(wait=True, cancel_futures=True)
