"""A call in a process of its own: what it crashes on is reported, and crashes nobody else."""

from __future__ import annotations

import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, ParamSpec, TypeVar

from .errors import OperationError, ShardDamaged
from .pool import PROCESS_TABLE, SPAWN, become_worker, starting_process

P = ParamSpec("P")
T = TypeVar("T")


# What a library does to itself over a damaged file; any other death comes from outside.
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)


class ChildDied(ShardDamaged):
    """The call crashed the process that made it; the message names the signal."""


class ChildLost(OperationError):
    """The process that made a call was killed, exited or took too long, which tells nothing of the data."""


def isolated(seconds: float, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Make a picklable call in a fresh process and return, or raise, what it does.

    Raises ChildDied where the call crashes its process, ChildLost where that ends in another way or
    takes longer than allowed. Thread-safe.
    """
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=_answer, args=(theirs, call, args, kwargs), daemon=True)
    with starting_process():
        process.start()
    theirs.close()
    try:
        failed, value = _received(ours, process, seconds)
    finally:
        ours.close()
        process.kill()
        with PROCESS_TABLE:
            process.join()
            process.close()
    if failed:
        raise value
    return value  # type: ignore[no-any-return]


def _received(ours: Connection, process: BaseProcess, seconds: float) -> tuple[bool, Any]:
    if not ours.poll(seconds):
        raise ChildLost(f"no answer within {seconds:.0f} seconds")
    try:
        answer: tuple[bool, Any] = ours.recv()
    except (EOFError, OSError):  # it ended before, or in the middle of, its answer
        with PROCESS_TABLE:
            process.join()
        raise _how_it_ended(process.exitcode or 0) from None
    return answer


def _how_it_ended(code: int) -> ChildDied | ChildLost:
    if -code in CRASHES:
        return ChildDied(f"the library that reads it crashed ({signal.Signals(-code).name})")
    if code < 0:
        hint = "; out of memory?" if -code == signal.SIGKILL else ""
        return ChildLost(f"the process that reads it was killed by signal {-code}{hint}")
    return ChildLost(f"the process that reads it exited with {code}")


def _answer(
    theirs: Connection, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    become_worker(theirs)
    try:
        answer = (False, call(*args, **kwargs))
    except Exception as error:  # whatever it is, it is raised again in the parent
        answer = (True, error)
    theirs.send(answer)
