"""The entry point of ``prep``: sets up streams and signals before anything large is imported."""

from __future__ import annotations

import io
import json
import mmap
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from shardprep.cli.console.start import Interrupted, load_failure

if TYPE_CHECKING:
    from sys import UnraisableHookArgs


# Modules that take and release locks: an exception there may leave one locked for good.
LOCKING = frozenset({"threading", "concurrent.futures._base", "concurrent.futures.thread", "queue"})
WAITING = frozenset({"wait", "join", "_wait_for_tstate_lock"})  # their functions that may be interrupted
RETRY_S = 0.002

START_BYTES = 160 << 20  # of address space: with less, OpenBLAS ends the process with 1 on import


def main() -> NoReturn:
    """Run ``prep`` with the command line's arguments and exit.

    The first signal unwinds the running command. A second one ends the process at once: workers end with it,
    and every command can be killed at any time.
    """
    _open_streams()
    _on_signals(_leave)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # else START_BYTES would grow with the CPUs
    try:
        mmap.mmap(-1, START_BYTES).close()
        # start-up time: signals are handled before these imports
        from shardprep.cli.app import failed, flush, run
        from shardprep.cli.console.output import asks_for_json
    except (ImportError, MemoryError, OSError) as error:
        _not_loaded(error)

    sys.unraisablehook = _unraisable
    try:
        _on_signals(_unwind)
        code = flush(run(sys.argv[1:]))
        _on_signals(_leave)  # within the try: a signal just after it would be a traceback
        signal.signal(signal.SIGALRM, signal.SIG_IGN)  # the retry of a signal that was put off
    except Interrupted as interrupted:
        code = flush(failed(interrupted, as_json=asks_for_json(sys.argv[1:])))
    if not sys.modules.keys().isdisjoint(("obstore", "ray")):
        # a thread of obstore that calls Python during finalization would abort the process; Ray's may hang
        os._exit(code)
    sys.exit(code)


def _not_loaded(error: BaseException) -> NoReturn:
    message = load_failure(error)
    sys.stderr.write(f"prep: {message}\n")
    if "--json" in sys.argv:
        found = {"kind": type(error).__name__, "message": message, "exit_code": 3}
        sys.stdout.write(json.dumps({"error": found}) + "\n")
    sys.exit(3)


def _open_streams() -> None:
    """Open descriptors 0 to 2 if they are closed: else a file gets that number, and the messages with it.

    Names that the user's encoding cannot represent are printed with escapes, as on stderr.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # os.open takes the lowest free number
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout, sys.stderr = sys.stdout or os.fdopen(1, "w"), sys.stderr or os.fdopen(2, "w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _on_signals(handler: Callable[[int, FrameType | None], None]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:  # set by nohup and ``&``
            signal.signal(number, handler)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    os._exit(128 + number)  # nothing to unwind yet, or any more


def _unwind(number: int, frame: FrameType | None) -> None:
    """Raise Interrupted once the interrupted code holds no lock of the standard library."""
    if frame and frame.f_globals.get("__name__") in LOCKING and frame.f_code.co_name not in WAITING:
        _unwind_later(number)
        return
    _on_signals(_leave)
    raise Interrupted(number)


def _unwind_later(number: int) -> None:
    signal.signal(signal.SIGALRM, lambda _, frame: _unwind(number, frame))
    signal.setitimer(signal.ITIMER_REAL, RETRY_S)


def _unraisable(found: UnraisableHookArgs) -> None:
    """Retry a signal that arrived in a finalizer, where Python drops exceptions."""
    if isinstance(found.exc_value, Interrupted):
        _unwind_later(found.exc_value.number)
    else:
        sys.__unraisablehook__(found)
