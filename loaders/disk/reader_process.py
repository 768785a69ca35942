"""Reads pieces of files by several processes at once. Run as a script, by reading.py; imports next to nothing.

Its own standard input says what to read, its output says what came of that. It has one thread and little
memory, so that it can fork in no time and without danger, which the process that asks for it can not.
"""

from __future__ import annotations

import array
import mmap
import os
import struct
import sys
import time

ORDER = struct.Struct("<qqqd")  # processes, bytes of a piece, where in a page to read to, seconds
REPORT = struct.Struct("<qqqqd")  # number, pieces, bytes, errno, when it was done
ANSWER = struct.Struct("<d")  # when it began; then a report of each


def main() -> None:
    """Fork the readers, let them go at once, and pass their reports on. Exits with 1 where one ended early."""
    depth, block, offset, seconds = ORDER.unpack(sys.stdin.buffer.read(ORDER.size))
    pieces = array.array("q", sys.stdin.buffer.read())
    (ready, tell_ready), (gate, open_gate), (reports, report) = os.pipe(), os.pipe(), os.pipe()
    for number in range(depth):
        if not os.fork():
            os.close(open_gate)
            mine = (pieces[2 * number :: 2 * depth], pieces[2 * number + 1 :: 2 * depth])
            _read(number, *mine, buffer(block, offset), seconds, (tell_ready, gate, report))
    for descriptor in (tell_ready, gate, report):
        os.close(descriptor)
    _all_of(ready, depth)
    began = time.perf_counter()
    os.write(open_gate, bytes(depth))
    answer = ANSWER.pack(began) + _all_of(reports, depth * REPORT.size)
    for _ in range(depth):
        os.wait()  # nobody else would, in a container without an init
    sys.stdout.buffer.write(answer)


def _read(
    number: int,
    files: array.array[int],
    offsets: array.array[int],
    into: memoryview,
    seconds: float,
    pipes: tuple[int, int, int],
) -> None:
    """A forked process's life: read its own pieces until they end, or time does, or its parent is gone."""
    tell_ready, gate, report = pipes
    parent, error, size, count = os.getppid(), 0, 0, 0
    os.write(tell_ready, b"r")
    if not os.read(gate, 1):
        os._exit(1)
    deadline = time.perf_counter() + seconds
    try:
        for file, offset in zip(files, offsets):  # noqa: B905 - they are cut from one array
            size += os.preadv(file, [into], offset)
            count += 1
            if time.perf_counter() >= deadline or os.getppid() != parent:
                break
    except OSError as failed:
        error = failed.errno or 5
    os.write(report, REPORT.pack(number, count, size, error, time.perf_counter()))
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
    """Memory to read into that begins so far into a page, laid out and touched beforehand."""
    memory = mmap.mmap(-1, size + mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(bytes(len(memory)))  # or the first reads would pay for its page faults
    return memoryview(memory)[offset : offset + size]


if __name__ == "__main__":
    main()
