"""A folder that is gone afterwards, whatever happens but SIGKILL."""

from __future__ import annotations

import secrets
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

PREFIX = ".prep-bench-disk-"


@contextmanager
def temporary_folder(beside: Path) -> Iterator[Path]:
    """A new folder in ``beside``. Raises OSError where it cannot be made.

    Signals wait while it is being removed, so that a second Ctrl-C leaves nothing behind either.
    """
    folder = beside / f"{PREFIX}{secrets.token_hex(4)}"
    try:
        try:
            folder.mkdir(mode=0o700)
            yield folder
        finally:
            _remove(folder)
    except BaseException:
        _remove(folder)  # a signal may have come just before the other attempt held them
        raise


def _remove(folder: Path) -> None:
    with signals_held():
        if folder.exists():
            shutil.rmtree(folder)


@contextmanager
def signals_held() -> Iterator[None]:
    """SIGINT and SIGTERM take effect at the end; only the main thread ever meets them."""
    held: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        held.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if callable(signal.getsignal(n))]
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if held:
            signal.raise_signal(held[0])
