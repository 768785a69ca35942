"""Atomic writing: a file has its final name only when it is complete and flushed.

The order, tested by killing at every system call: write elsewhere, flush, rename, flush the folder.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from shardprep.formats.errors import OperationError

from .regular_file import naming

READ_BYTES = 1 << 18  # fits the CPU's cache; one buffer for all reads avoids page faults


def flush_file(path: Path) -> None:
    """Flush the file to the disk. An error is final: a flush is never repeated for the same file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(built: Path, final: Path) -> None:
    """Give a flushed file its final name, read-only, replacing an existing file; durable on return.

    Raises OperationError if there is a folder of that name, OSError.
    """
    built.chmod(0o444)
    try:
        built.replace(final)
    except IsADirectoryError as error:
        raise OperationError("is a folder where a file belongs; move it away", path=final) from error
    flush_file(final.parent)


def unfinished(folder: Path, name: str) -> Path:
    """Return a new path in ``folder`` for the unfinished file ``name``: no two attempts write one file."""
    return folder / f"{name}.{secrets.token_hex(8)}.tmp"


@contextmanager
def publishing(final: Path, folder: Path) -> Iterator[BinaryIO]:
    """Open a file to write in ``folder``; leaving without an error flushes and publishes it as ``final``."""
    built = unfinished(folder, final.name)
    with naming(built), built.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    publish(built, final)


def publish_bytes(final: Path, data: bytes, folder: Path) -> None:
    """Write a small file in ``folder`` and publish it."""
    with publishing(final, folder) as file:
        file.write(data)


def check_replaceable(path: Path) -> None:
    """Raise OperationError if a folder, a device or anything else but a regular file has this path."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise OperationError("is not a regular file that can be replaced; name another place", path=path)


def save_bytes(final: Path, data: bytes) -> None:
    """Write a file where a user wants it, replacing a regular file at once.

    Nothing is left of a write that fails or is interrupted. Raises OperationError if something else than a
    regular file is there, OSError.
    """
    check_replaceable(final)
    built = unfinished(final.parent, "")
    try:
        with built.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        built.replace(final)
        flush_file(final.parent)
    except OSError as error:
        error.filename, error.filename2 = str(final), None  # not the unfinished file
        raise
    finally:
        built.unlink(missing_ok=True)


def hash_file(path: Path) -> str:
    """Return ``sha256:<hex>`` of a file, read to its end."""
    with naming(path), path.open("rb", buffering=0) as file:
        return hash_descriptor(file.fileno())


def hash_descriptor(descriptor: int, start: int = 0, stop: int | None = None) -> str:
    """Return ``sha256:<hex>`` of an open file from ``start`` to ``stop``, or its end.

    Does not move its position.
    """
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(READ_BYTES))
    position, end = start, sys.maxsize if stop is None else stop
    while count := os.preadv(descriptor, [buffer[: end - position]], position):
        digest.update(buffer[:count])
        position += count
    return "sha256:" + digest.hexdigest()
