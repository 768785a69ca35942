"""Putting files in place so that nothing half-written can ever be found.

The order, tested by killing at every system call: write beside, flush, rename, flush the folder.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

READ_BYTES = 1 << 18  # fits the cache beside the hash; a buffer made once spares the page faults


def flush_file(path: Path) -> None:
    """Have the file's bytes on the disk. An error here is final: never retried on the same file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(built: Path, final: Path) -> None:
    """Give a flushed file its final name, read-only, replacing what was there; durable on return."""
    built.chmod(0o444)
    built.replace(final)
    flush_file(final.parent)


@contextmanager
def publishing(final: Path, workplace: Path) -> Iterator[BinaryIO]:
    """A file to write; on leaving without error it is flushed and published as ``final``."""
    built = workplace / (final.name + ".tmp")
    built.unlink(missing_ok=True)
    with built.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    publish(built, final)


def publish_bytes(final: Path, data: bytes, workplace: Path) -> None:
    """Publish a small file."""
    with publishing(final, workplace) as file:
        file.write(data)


def hash_file(path: Path) -> str:
    """``sha256:<hex>`` of a file, read to its end."""
    with path.open("rb", buffering=0) as file:
        return hash_descriptor(file.fileno())


def hash_descriptor(descriptor: int) -> str:
    """``sha256:<hex>`` of an open file from its beginning; does not move its position."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(READ_BYTES))
    position = 0
    while count := os.preadv(descriptor, [buffer], position):
        digest.update(buffer[:count])
        position += count
    return "sha256:" + digest.hexdigest()
