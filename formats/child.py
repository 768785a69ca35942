"""Processes of our own that make calls for us: what they crash on is told, and crashes nobody else."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any, ParamSpec, TypeVar

from .errors import OperationError, ShardDamaged

P = ParamSpec("P")
T = TypeVar("T")

SPAWN = multiprocessing.get_context("spawn")

# To hold while starting or joining a process. multiprocessing reaps finished children at both, and
# two threads that do so at once take the exit code from each other.
PROCESS_TABLE = threading.Lock()

# What a library does to itself over a damaged file; any other death comes from outside.
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)


class ChildDied(ShardDamaged):
    """The call crashed the process that made it; the message names the signal."""


class ChildLost(OperationError):
    """The process that made a call was killed, exited or took too long, which tells nothing of the data."""


class Child(AbstractContextManager["Child"]):
    """One process, spawned, that makes one picklable call after another.

    Not thread-safe, but for :meth:`kill`. It uses nothing but a nameless pair of sockets, so nothing
    stays anywhere however either side ends; it ends at once when its parent does.
    """

    def __init__(self) -> None:
        self._ours, theirs = SPAWN.Pipe()
        self._process = SPAWN.Process(target=_serve, args=(theirs,), daemon=True)
        with theirs, starting_process():
            self._process.start()

    def call(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return, or raise, what the call does. Raises ChildDied or ChildLost where the process ends."""
        return self.call_within(None, call, *args, **kwargs)

    def call_within(
        self, seconds: float | None, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """The same; ChildLost, too, where it takes longer."""
        failed, value = self._asked(seconds, (call, args, kwargs))
        if failed:
            raise value
        return value  # type: ignore[no-any-return]

    def _asked(self, seconds: float | None, question: Any) -> tuple[bool, Any]:
        try:
            self._ours.send(question)
            if not self._ours.poll(seconds):
                raise ChildLost(f"no answer within {seconds:.0f} seconds")
            answer: tuple[bool, Any] = self._ours.recv()
        except (EOFError, OSError):  # it ended before, or in the middle of, its answer
            raise self._ended() from None
        return answer

    def _ended(self) -> ChildDied | ChildLost:
        with PROCESS_TABLE:
            self._process.join()
        code = self._process.exitcode or 0
        if -code in CRASHES:
            return ChildDied(f"the library that reads it crashed ({signal.Signals(-code).name})")
        if code < 0:
            hint = "; out of memory?" if -code == signal.SIGKILL else ""
            return ChildLost(f"the process that worked on it was killed by signal {-code}{hint}")
        return ChildLost(f"the process that worked on it exited with {code}")

    def kill(self) -> None:
        """End it in the middle of what it does."""
        self._process.kill()

    def __exit__(self, *exc: object) -> None:
        self._ours.close()
        self._process.kill()
        with PROCESS_TABLE:
            self._process.join()
            self._process.close()


def isolated(seconds: float, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Make a call in a process of its own, as :meth:`Child.call_within` does. Thread-safe."""
    with Child() as child:
        return child.call_within(seconds, call, *args, **kwargs)


def _serve(theirs: Connection) -> None:
    """A child's life: answer until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, args=(theirs.fileno(),), daemon=True).start()
    while True:
        try:
            call, args, kwargs = theirs.recv()
        except (EOFError, OSError):
            return
        try:
            answer = (False, call(*args, **kwargs))
        except Exception as error:  # whatever it is, it is raised again in the parent
            answer = (True, error)
        theirs.send(answer)


def _end_with_parent(descriptor: int) -> None:
    poller = select.poll()
    poller.register(descriptor, 0)  # nothing asked for: only the hang-up is reported
    poller.poll()
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
