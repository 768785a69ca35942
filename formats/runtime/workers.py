"""Child processes that make calls for this one, alone or as a pool: a crash is an error of the call."""

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
from shardprep.formats.runtime.owned import Owned, starting_thread
from shardprep.formats.runtime.processes import Channel, SpawnedProcess, keep_freed_memory

P = ParamSpec("P")
T = TypeVar("T")

# The time for a child to become ready: imports from a slow network disk take a minute.
START_TIMEOUT_S = 120.0
# The time for a child that closed its channel to exit.
EXIT_TIMEOUT_S = 1.0
KEPT_BYTES = 256 << 20  # of freed memory: the shards that one call after another holds

# Signals of a library that crashes on a damaged file; any other signal comes from outside.
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)


class ChildDied(ShardDamaged):
    """The call crashed its process; the message and ``signal`` name the signal."""

    signal = ""


class ChildLost(OperationError):
    """The process of a call was killed, exited or took too long, which says nothing about the data."""


class Child(Owned, AbstractContextManager["Child"]):
    """A spawned process that makes one picklable call after another.

    Not thread-safe, except for :meth:`kill`. The kernel reports its exit, even if a process that it forked
    still runs. It ends at once when its parent does, and leaves nothing behind. A process that is not ready
    within START_TIMEOUT_S is killed and started again; if that is not ready either, WorkerDied is raised.
    """

    def __init__(self) -> None:
        self._is_ready = False
        self._is_killed = False
        self._process = SpawnedProcess(_serve)

    def call(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return, or raise, what the call does. Raises ChildDied or ChildLost if the process ends."""
        return self.call_within(None, call, *args, **kwargs)

    def call_within(
        self, seconds: float | None, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Make a call with a time limit, once the process is ready. Raises ChildLost if it takes longer."""
        self._await_ready()
        self._process.channel.post(ForkingPickler.dumps((call, args, kwargs)))
        answer = self._answer(math.inf if seconds is None else seconds)
        if answer is None:
            raise ChildLost(f"no answer within {seconds:.0f} seconds")
        return _value_of(answer)  # type: ignore[no-any-return]

    def _await_ready(self) -> None:
        if self._is_ready:
            return
        answer = self._answer(START_TIMEOUT_S)
        if answer is None:
            self._start_again()
            answer = self._answer(START_TIMEOUT_S)
        if answer is None:
            raise not_ready(START_TIMEOUT_S)
        _value_of(answer)
        self._is_ready = True

    def _start_again(self) -> None:
        self._process.end(0)
        self._process = SpawnedProcess(_serve)
        if self._is_killed:  # perhaps the kill was for the process before
            self._process.kill()

    def _answer(self, seconds: float) -> bytes | None:
        """Return the next message, None after ``seconds``. Raises ChildDied or ChildLost at its end."""
        process, until = self._process, monotonic() + seconds
        while True:
            has_exited = process.has_exited()  # checked first: messages sent before the exit are received
            try:
                is_sent = process.channel.flush()
                for message in process.channel.arrived():
                    return message
            except OSError:  # it closed the channel while the call was sent
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
        """Kill the process at once. May be called from any thread."""
        self._is_killed = True
        self._process.kill()

    def __exit__(self, *exc: object) -> None:
        self._process.end(0)


def _value_of(answer: bytes) -> Any:
    """Return the result of the process, or raise its error."""
    failed, value = ForkingPickler.loads(answer)
    if failed:
        raise value
    return value


def isolated(seconds: float, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Make a call in a new process, as :meth:`Child.call_within` does. Thread-safe."""
    with Child() as child:
        return child.call_within(seconds, call, *args, **kwargs)


def not_ready(seconds: float) -> WorkerDied:
    """Return the error for a process that was started twice and was never ready."""
    return WorkerDied(
        f"a worker process was not ready within {seconds:g} s, twice in a row, and was killed: check whether "
        "it hangs in an import (a network disk, a lock), is stopped (SIGSTOP, a debugger, a frozen control "
        "group) or lacks CPU or memory"
    )


def _serve(channel: Channel, begin: Callable[[], None]) -> None:
    """Run the child: report that it is ready, or why not, then answer calls until the channel ends."""
    keep_freed_memory(KEPT_BYTES)
    try:
        begin()
    except OperationError as error:
        _send_answer(channel, (True, error))
        return
    can_go_on = _send_answer(channel, (False, None))
    while can_go_on and (question := channel.receive()) is not None:
        call, args, kwargs = ForkingPickler.loads(question)
        try:
            answer: tuple[bool, Any] = (False, call(*args, **kwargs))
        except Exception as error:  # it is raised again in the parent
            answer = (True, error)
        can_go_on = _send_answer(channel, answer)


def _send_answer(channel: Channel, answer: tuple[bool, Any]) -> bool:
    """Send the answer; return false if the parent is gone, for example after this process was stopped."""
    message = ForkingPickler.dumps(answer)
    try:
        channel.send(message)
    except ConnectionError:
        return False
    return True


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
    process that is not ready within START_TIMEOUT_S, twice, is WorkerDied. Leaving the context with
    an error (Ctrl-C, a failed job) kills all processes. Raises OperationError if the system allows no further
    thread or process.
    """

    def __init__(self, workers: int) -> None:
        self._threads = ThreadPoolExecutor(workers, "shardprep-pool")
        self._lock = threading.Lock()
        self._idle: list[Child] = []
        self._busy: set[Child] = set()
        self._ended = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        with starting_thread():
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
        """Make a call with a time limit, in this thread.

        With ``is_clean``, a process whose call fails, or returns a value that is not clean, makes no other.
        Raises ChildDied, and ChildLost also if it takes longer.
        """
        child, is_kept = self._taken(), is_clean is None
        try:
            value = child.call_within(seconds, fn, *args, **kwargs)
            is_kept = is_clean is None or is_clean(value)
            return value
        except (ChildDied, ChildLost, WorkerDied):
            is_kept = False
            raise
        finally:
            (self._returned if is_kept else self._gone)(child)

    def kill(self) -> None:
        """Kill the processes at work; later calls raise ChildLost. May be called from any thread."""
        with self._lock:
            self._ended = True
            for child in self._busy:
                child.kill()

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
