"""A large file to read where a folder has none: without a name, so that nothing can be left of it."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from ...formats.errors import NoSpace

LARGEST = 1 << 30
SMALLEST = 4 << 20
SHARE_OF_FREE = 4  # the rest is for what else grows on this disk meanwhile
FIRST_CHUNK = 16 << 20


def noise(size: int) -> bytes:
    """Bytes that no file system can compress."""
    return np.random.default_rng().bytes(size)


def room(folder: Path, wanted: int) -> int:
    """How many of the wanted bytes may be written there: at most a quarter of what is free."""
    return min(wanted, shutil.disk_usage(folder).free // SHARE_OF_FREE)


def write_scratch_file(folder: Path, stack: ExitStack, *, seconds: float) -> int:
    """Write and flush for so many seconds, 4 MiB to 1 GiB; a descriptor that the stack closes.

    Raises NoSpace where a quarter of the free space is less than that, OSError where writing fails.
    """
    size = room(folder, LARGEST)
    if size < SMALLEST:
        raise NoSpace(f"has no room for a file of {SMALLEST >> 20} MiB; make room", path=folder)
    try:
        file = stack.enter_context(tempfile.TemporaryFile(dir=folder, buffering=0))  # noqa: SIM115 - the stack's
        _fill(file.fileno(), size, time.monotonic() + seconds)
    except OSError as error:
        error.filename = str(folder)  # not the name that it had for a moment
        raise
    return file.fileno()


def _fill(descriptor: int, size: int, deadline: float) -> None:
    """Flushed piece by piece: what the page cache takes says nothing about how long the disk will take."""
    data = memoryview(noise(min(size, FIRST_CHUNK)))
    written = 0
    while written < size and (written < SMALLEST or time.monotonic() < deadline):
        step = SMALLEST if written < SMALLEST else len(data)
        written += write_all(descriptor, data[: min(step, size - written)])
        os.fsync(descriptor)


def write_all(descriptor: int, data: memoryview) -> int:
    """Write all of it where the file's position is; its length."""
    written = 0
    while written < len(data):
        written += os.write(descriptor, data[written:])
    return written
