"""Reading and writing of a file at a position, independent of its descriptor's, up to the file's end.

A read may return fewer bytes than requested: at a bad sector of a disk, NFS or FUSE, or after a signal.
Only a read of no bytes is the end of a file.
"""

from __future__ import annotations

import os


def read_into(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Fill ``buffer`` from ``offset``; return the number of bytes that the file had. Raises OSError."""
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done:]], offset + done)
        if not count:
            break
        done += count
    return done


def read_at(descriptor: int, size: int, offset: int) -> bytes:
    """Return ``size`` bytes from ``offset``, fewer only if the file ends before. Raises OSError."""
    data = os.pread(descriptor, size, offset)
    if len(data) == size or not data:
        return data
    buffer = bytearray(size)
    buffer[: len(data)] = data
    view = memoryview(buffer)
    return bytes(view[: len(data) + read_into(descriptor, view[len(data) :], offset + len(data))])


def write_at(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset``. Raises OSError."""
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count
