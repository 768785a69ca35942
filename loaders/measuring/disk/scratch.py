"""A large scratch file to read in a folder: it has no name, so that nothing is left of it."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

import numpy as np

from shardprep.formats.errors import NoSpace

LARGEST = 1 << 30
SMALLEST = 4 << 20
FREE_DIVISOR = 4  # the rest of the free space is for other programs
CHUNK_BYTES = 16 << 20


PREFIX = ".prep-bench-disk-"


def noise(size: int) -> bytes:
    """Return random bytes, which no file system can compress."""
    return np.random.default_rng().bytes(size)


def room(folder: Path, wanted: int) -> int:
    """Number of the wanted bytes that may be written to the folder: at most a quarter of the free space."""
    return min(wanted, shutil.disk_usage(folder).free // FREE_DIVISOR)


def write_scratch_file(folder: Path, stack: ExitStack, *, seconds: float) -> int:
    """Write and flush 4 MiB to 1 GiB for ``seconds``; return a descriptor, which the stack closes.

    Raises NoSpace where a quarter of the free space is less than 4 MiB, OSError where writing fails.
    """
    size = room(folder, LARGEST)
    if size < SMALLEST:
        raise NoSpace(f"has no room for a file of {SMALLEST >> 20} MiB; make room", path=folder)
    try:
        file = stack.enter_context(tempfile.TemporaryFile(dir=folder, buffering=0))  # noqa: SIM115 - the stack's
        _fill(file.fileno(), size, time.monotonic() + seconds)
    except OSError as error:
        error.filename = str(folder)  # not the file's temporary name
        raise
    return file.fileno()


def _fill(descriptor: int, size: int, deadline: float) -> None:
    """Write and flush piece by piece: writes to the page cache do not show how long the disk takes."""
    data = memoryview(noise(min(size, CHUNK_BYTES)))
    written = 0
    while written < size and (written < SMALLEST or time.monotonic() < deadline):
        step = SMALLEST if written < SMALLEST else len(data)
        written += write_all(descriptor, data[: min(step, size - written)])
        os.fsync(descriptor)


def write_all(descriptor: int, data: memoryview) -> int:
    """Write all of ``data`` at the file's position; return its length."""
    written = 0
    while written < len(data):
        written += os.write(descriptor, data[written:])
    return written


@contextmanager
def temporary_folder(beside: Path) -> Iterator[Path]:
    """Make a new folder in ``beside``, and remove it at the end. Raises OSError where it cannot be made.

    Signals are delayed during the removal, so that a second Ctrl-C leaves nothing behind.
    """
    folder = beside / f"{PREFIX}{secrets.token_hex(4)}"
    try:
        try:
            folder.mkdir(mode=0o700)
            yield folder
        finally:
            _remove(folder)
    except BaseException:
        _remove(folder)  # a signal may have come before the first removal delayed them
        raise


def _remove(folder: Path) -> None:
    with signals_held():
        if folder.exists():
            shutil.rmtree(folder)


@contextmanager
def signals_held() -> Iterator[None]:
    """Delay SIGINT and SIGTERM until the end; only the main thread receives them."""
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
