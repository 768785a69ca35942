"""A script, run by disk_files.py, that reads pieces of files in several processes at once.

It reads an order from stdin and writes an answer to stdout. Unlike its caller it can fork quickly and safely:
it imports almost nothing, and has one thread and little memory.
"""

from __future__ import annotations

import array
import mmap
import os
import struct
import sys
import time
from itertools import islice

ORDER = struct.Struct("<qqqqd")  # processes, bytes of a piece, offset in a page, pieces ahead, seconds
REPORT = struct.Struct("<qqqqd")  # number, pieces, bytes, errno, time of the end
ANSWER = struct.Struct("<d")  # time of the start; the reports of all processes follow


def main() -> None:
    """Fork the readers, start them together, and write their reports. Exits with 1 if one ends early."""
    depth, block, offset, ahead, seconds = ORDER.unpack(sys.stdin.buffer.read(ORDER.size))
    pieces = array.array("q", sys.stdin.buffer.read())
    (ready, ready_writer), (start, start_writer), (reports, report_writer) = os.pipe(), os.pipe(), os.pipe()
    for number in range(depth):
        if not os.fork():
            os.close(start_writer)
            own = list(zip(pieces[2 * number :: 2 * depth], pieces[2 * number + 1 :: 2 * depth]))  # noqa: B905
            _read(number, own, buffer(block, offset), ahead, seconds, (ready_writer, start, report_writer))
    for descriptor in (ready_writer, start, report_writer):
        os.close(descriptor)
    _all_of(ready, depth)
    began = time.perf_counter()
    os.write(start_writer, bytes(depth))
    answer = ANSWER.pack(began) + _all_of(reports, depth * REPORT.size)
    for _ in range(depth):
        os.wait()  # in a container without an init nobody else would
    sys.stdout.buffer.write(answer)


def _read(
    number: int,
    pieces: list[tuple[int, int]],
    into: memoryview,
    ahead: int,
    seconds: float,
    pipes: tuple[int, int, int],
) -> None:
    """Read a reader's pieces until they end, the time is over, or the parent is gone; then exit.

    It closes each pipe after the last write, so that its reader sees the end once all processes are done.
    """
    ready_writer, start, report_writer = pipes
    parent, error, size, count = os.getppid(), 0, 0, 0
    os.close(sys.stdout.fileno())
    os.write(ready_writer, b"r")
    os.close(ready_writer)
    if not os.read(start, 1):
        os._exit(1)
    deadline = time.perf_counter() + seconds
    requests = iter(pieces)
    try:
        for file, offset in pieces:
            for wanted in islice(requests, 1 if count else 1 + ahead) if ahead else ():
                os.posix_fadvise(*wanted, len(into), os.POSIX_FADV_WILLNEED)
            size += os.preadv(file, [into], offset)
            count += 1
            if time.perf_counter() >= deadline or os.getppid() != parent:
                break
    except OSError as failed:
        error = failed.errno or 5
    os.write(report_writer, REPORT.pack(number, count, size, error, time.perf_counter()))
    os._exit(0)


def _all_of(descriptor: int, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = os.read(descriptor, size - len(found))
        if not part:
            sys.exit(1)
        found += part
    return found


def buffer(size: int, offset: int) -> memoryview:
    """Return a buffer that begins ``offset`` bytes into a page."""
    memory = mmap.mmap(-1, size + mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(bytes(len(memory)))  # else page faults would slow the first reads
    return memoryview(memory)[offset : offset + size]


if __name__ == "__main__":
    main()
