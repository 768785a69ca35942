"""The spawning of a process: what must hold while it is started."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.spawn import get_preparation_data, prepare
from typing import Any

from shardprep.formats.errors import OperationError, UsageError

SPAWN = multiprocessing.get_context("spawn")

POLL_INTERVAL_S = 0.05  # between two calls of ``wanted`` while another thread starts a process

# A start changes the main module's attributes, which a child reads. And multiprocessing reaps finished
# children whenever it starts one: two threads that do so at once take the exit code from each other.
_start_lock = threading.Lock()

_is_importing_main = False

_hidden: dict[str, Any] | None = None  # what was hidden of the main module


def _free_in_copy() -> None:
    """Unlock starts in a forked copy of this process, where the thread that started one is missing."""
    global _start_lock
    _start_lock = threading.Lock()
    _show_main_module()


os.register_at_fork(after_in_child=_free_in_copy)


@contextmanager
def starting_process(wanted: Callable[[], bool]) -> Iterator[None]:
    """The context in which a process is spawned, one thread at a time.

    The child does not import the main module, and SIGINT is blocked in it from its first instruction on.
    Raises OperationError if the system allows no further process, or if ``wanted()`` becomes false while
    another thread starts one, and UsageError while a child imports the main module.
    """
    refuse_in_main_import()
    lock = _start_lock
    while not lock.acquire(timeout=POLL_INTERVAL_S):
        if not wanted():
            raise OperationError("the process that was to be started is not wanted any more")
    try:
        resource_tracker.ensure_running()  # starting it later would unblock the signal
        with _sigint_blocked(), _main_module_hidden(), _with_children():
            yield
    except BlockingIOError as error:
        raise OperationError(
            "the system allows no further process: raise the limit (ulimit -u, or pids.max of the control group), "
            "or use fewer workers"
        ) from error
    finally:
        lock.release()


def open_streams() -> None:
    """Open descriptors 0 to 2 on /dev/null if the program closed them.

    Otherwise the next descriptors get these numbers: a child closes its channel as its stdin, libraries
    write their warnings into files, and multiprocessing fails.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # os.open takes the lowest free number
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def main_module() -> dict[str, str]:
    """Return the place of this process's main module, for :func:`import_main` in a child."""
    with _start_lock:  # a start in another thread hides it
        given = get_preparation_data("")
    return {name: value for name, value in given.items() if name.startswith("init_main")}


def import_main(main: Mapping[str, str]) -> None:
    """Import the parent's main module, if one is given, as ``__main__`` of this process."""
    global _is_importing_main
    _is_importing_main = True
    prepare(dict(main))
    _is_importing_main = False


def refuse_in_main_import() -> None:
    """Raise UsageError in a child that imports a main module without a guard, which starts processes."""
    if _is_importing_main:
        raise UsageError(
            "a worker process imports the main script, which must not start processes then: put everything but "
            'definitions under `if __name__ == "__main__":`'
        )


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextmanager
def _with_children() -> Iterator[None]:
    """Allow children of a daemonic process, such as a worker of Dask: these end when it does."""
    this = multiprocessing.current_process()
    was_daemonic = this.daemon
    try:
        this.daemon = False
        yield
    finally:
        this.daemon = was_daemonic


@contextmanager
def _main_module_hidden() -> Iterator[None]:
    global _hidden
    names = vars(sys.modules["__main__"])
    _hidden = {name: names[name] for name in ("__file__", "__spec__") if name in names}
    try:
        names.update(__file__=None, __spec__=None)
        yield
    finally:
        _show_main_module()


def _show_main_module() -> None:
    global _hidden
    known, _hidden = _hidden, None
    if known is not None:
        names = vars(sys.modules["__main__"])
        for name in ("__file__", "__spec__"):
            names.pop(name, None)
        names.update(known)
