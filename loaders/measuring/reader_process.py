"""A script, run by disk.py, that reads pieces of files in several processes at once.

Stdin has a descriptor and an offset for each piece, as int64. Each process writes a line: its number, pieces,
bytes, errno, and the times of its begin and end. Unlike its caller the script can fork quickly and safely: it
imports almost nothing, and has one thread and little memory.
"""

from __future__ import annotations

import array
import mmap
import os
import sys
import time
from itertools import islice


def main(folder: str, seconds: float, depth: int, block: int, in_page: int, ahead: int, flags: int) -> None:
    """Fork ``depth`` processes that each read every ``depth``-th piece for ``seconds``; start them together.

    A piece has ``block`` bytes, and is read to ``in_page`` bytes after the start of a page; ``ahead`` pieces
    are requested before they are read. If there are ``flags``, files are opened again with them: those of a
    ``folder``, whose names there are numbers instead of descriptors, for each piece.
    """
    numbers = array.array("q", sys.stdin.buffer.read())
    names = {file: f"{folder or '/dev/fd'}/{file}" for file in set(numbers[::2])}
    opened = {file: os.open(name, flags) if flags and not folder else file for file, name in names.items()}
    (ready, is_ready), (start, starts) = os.pipe(), os.pipe()
    for number in range(depth):
        if not os.fork():
            os.close(starts)
            memory = mmap.mmap(-1, block + mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory.write(bytes(len(memory)))  # else page faults would slow the first reads
            into = memoryview(memory)[in_page : in_page + block]
            own = zip(numbers[2 * number :: 2 * depth], numbers[2 * number + 1 :: 2 * depth], strict=True)
            pieces = [(opened[file], offset) for file, offset in own]
            os.close(is_ready)
            os.read(start, 1)
            report = _read(pieces, into, ahead, flags, names if folder else {}, seconds)
            os.write(1, (" ".join(map(repr, (number, *report))) + "\n").encode())
            os._exit(0)
    os.close(is_ready)
    os.read(ready, 1)  # until all have closed it
    os.close(starts)
    for _ in range(depth):
        os.wait()  # in a container without an init nobody else would


def _read(
    pieces: list[tuple[int, int]],
    into: memoryview,
    ahead: int,
    flags: int,
    names: dict[int, str],
    seconds: float,
) -> tuple[int, int, int, float, float]:
    """Read the pieces until they end or the time is over."""
    count = size = error = 0
    requests, began = iter(pieces), time.perf_counter()
    end = began + seconds
    try:
        for file, offset in pieces:
            for wanted in islice(requests, 1 if count else 1 + ahead) if ahead else ():
                os.posix_fadvise(*wanted, len(into), os.POSIX_FADV_WILLNEED)
            descriptor = os.open(names[file], flags) if names else file
            size += os.preadv(descriptor, [into], offset)
            if names:
                os.close(descriptor)
            count += 1
            if time.perf_counter() >= end:
                break
    except OSError as failed:
        error = failed.errno or 5
    return count, size, error, began, time.perf_counter()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), *map(int, sys.argv[3:]))
