"""The entry of ``prep``: what must hold before anything large is imported, and after all is done."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn


class Interrupted(BaseException):
    """A signal came: unwind, so that workers end and locks are given back."""

    def __init__(self, number: int) -> None:
        word = "interrupted" if number == signal.SIGINT else "terminated"
        super().__init__(f"{word}; the same command goes on from here")
        self.exit_code = 128 + number


def main() -> NoReturn:
    """Run ``prep`` on the command line's words and exit."""
    _open_streams()
    _on_signals(_leave)
    from .commands import failed, flush, run  # takes a moment

    try:
        _on_signals(_unwind)
        code = flush(run(sys.argv[1:]))
    except Interrupted as interrupted:
        code = flush(failed(str(interrupted), interrupted.exit_code))
    _on_signals(_leave)
    sys.exit(code)


def _open_streams() -> None:
    """Open closed descriptors 0 to 2, or a file of ours would get one, and our messages.

    Names that are not text in the user's encoding are printed with escapes, as on stderr.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # the lowest that is free is the one that is opened
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout, sys.stderr = sys.stdout or os.fdopen(1, "w"), sys.stderr or os.fdopen(2, "w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _on_signals(handler: Callable[[int, FrameType | None], NoReturn]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup and ``&`` want it
            signal.signal(number, handler)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    os._exit(128 + number)  # there is nothing yet, or no longer, to unwind


def _unwind(number: int, frame: FrameType | None) -> NoReturn:
    raise Interrupted(number)


if __name__ == "__main__":
    main()
