"""The entry point of ``prep``: sets up streams and signals before anything large is imported."""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from shardprep.formats.runtime import open_streams


def main() -> NoReturn:
    """Run ``prep`` with the command line's arguments and exit.

    The first signal unwinds the running command. A second one ends the process at once: workers end with it,
    and every command can be killed at any time.
    """
    open_streams()
    sys.stdout, sys.stderr = sys.stdout or os.fdopen(1, "w"), sys.stderr or os.fdopen(2, "w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for names that the encoding cannot represent
    _set_signal_handlers(_exit_at_once)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # else NumPy's import takes memory for each CPU
    try:
        # start-up time: signals are handled before these imports
        from shardprep.cli.app import flush, report_error, run
        from shardprep.cli.console.output import Interrupted, is_json_requested
        from shardprep.formats.errors import OperationError
    except ImportError as error:
        sys.stderr.write(f"prep: cannot be loaded: {error}\n")
        sys.exit(3)

    def unwind(number: int, frame: FrameType | None) -> NoReturn:
        _set_signal_handlers(_exit_at_once)
        raise Interrupted(number)

    try:
        _set_signal_handlers(unwind)
        code = flush(run(sys.argv[1:]))
        _set_signal_handlers(_exit_at_once)  # within the try: a signal just after it would be a traceback
    except Interrupted as interrupted:
        code = flush(report_error(interrupted, as_json=is_json_requested(sys.argv[1:])))
    except BaseException as error:  # Python would exit with 1, which says that data is damaged
        _set_signal_handlers(_exit_at_once)
        sys.excepthook(*sys.exc_info())
        reason = f"an unexpected error, see the traceback: {type(error).__name__}: {error}"
        code = flush(report_error(OperationError(reason), as_json=is_json_requested(sys.argv[1:])))
    if not sys.modules.keys().isdisjoint(("obstore", "ray")):
        gc.collect()  # an error's frames may keep temporary files
        # a thread of obstore that calls Python during finalization would abort the process; Ray's may hang
        os._exit(code)
    sys.exit(code)


def _set_signal_handlers(handler: Callable[[int, FrameType | None], None]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # set by nohup and ``&``
            signal.signal(number, handler)


def _exit_at_once(number: int, frame: FrameType | None) -> NoReturn:
    os._exit(128 + number)  # nothing to unwind yet, or any more
