"""Reading a plan's pieces with preadv(2), one at a time or by as many processes as the plan is deep.

Processes, because sixteen threads that take turns at the GIL read a third less from memory than the
same number of threads of a C program.
"""

from __future__ import annotations

import array
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ...formats.errors import WorkerDied
from . import reader_process
from .plans import Piece, Plan
from .reader_process import ANSWER, ORDER, REPORT

# A copy into whole pages is up to a tenth slower on some processors (both ends then share their low address
# bits), one into 16 bytes past a page, as from malloc, on others; only O_DIRECT needs whole pages.
CACHE_LINE = 64


class Reading(NamedTuple):
    """So many bytes in so many seconds, and the pieces that they were."""

    size: int
    seconds: float
    pieces: list[Piece]

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.size / max(self.seconds, 1e-9)


def read(files: Sequence[int], plan: Plan, *, seconds: float, direct: bool = False) -> Reading:
    """Read the pieces in their order until they end or time does; one at least, by each process.

    ``files`` are descriptors, opened with O_DIRECT if ``direct`` says so. Raises OSError, and WorkerDied
    where a reading process is killed. Any other exception (Ctrl-C) ends the processes.
    """
    advise(files, plan)
    if plan.depth > 1:
        return _read_at_once(files, plan, seconds, direct=direct)
    return _read_in_turn(files, plan, seconds, direct=direct)


def _read_in_turn(files: Sequence[int], plan: Plan, seconds: float, *, direct: bool) -> Reading:
    into, size, count = [buffer(plan.block, direct=direct)], 0, 0
    began = time.perf_counter()
    deadline = began + seconds
    _ask_for(files, plan, 0, plan.ahead)
    for file, offset in plan.pieces:
        count += 1
        if plan.ahead:
            _ask_for(files, plan, count - 1 + plan.ahead, 1)
        size += os.preadv(files[file], into, offset)
        if time.perf_counter() >= deadline:
            break
    return Reading(size, time.perf_counter() - began, plan.pieces[:count])


def _read_at_once(files: Sequence[int], plan: Plan, seconds: float, *, direct: bool) -> Reading:
    """Each process takes every ``depth``-th piece; the last one to end ends the time."""
    depth = min(plan.depth, len(plan.pieces))
    order = ORDER.pack(depth, plan.block, 0 if direct else CACHE_LINE, seconds)
    flat = array.array("q", [part for file, offset in plan.pieces for part in (files[file], offset)])
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(Path(reader_process.__file__))],
        input=order + flat.tobytes(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=files,
        process_group=0,  # Ctrl-C is for the process that knows what to do then
    )
    if done.returncode or len(done.stdout) != ANSWER.size + depth * REPORT.size:
        raise WorkerDied("a process that was reading ended early; out of memory?")
    return _together(done.stdout, plan.pieces, depth)


def _together(answer: bytes, pieces: list[Piece], depth: int) -> Reading:
    (began,) = ANSWER.unpack_from(answer)
    size, ended, passed = 0, began, []
    for number, count, read_bytes, error, at in REPORT.iter_unpack(answer[ANSWER.size :]):
        if error:
            raise OSError(error, os.strerror(error))
        size, ended = size + read_bytes, max(ended, at)
        passed += pieces[number::depth][:count]
    return Reading(size, ended - began, passed)


def _ask_for(files: Sequence[int], plan: Plan, first: int, count: int) -> None:
    if hasattr(os, "posix_fadvise"):
        for file, offset in plan.pieces[first : first + count]:
            os.posix_fadvise(files[file], offset, plan.block, os.POSIX_FADV_WILLNEED)


def advise(files: Sequence[int], plan: Plan) -> None:
    """Tell the kernel what comes, as readers that know it do."""
    if hasattr(os, "posix_fadvise"):
        advice = os.POSIX_FADV_RANDOM if plan.random else os.POSIX_FADV_SEQUENTIAL
        for file in files:
            os.posix_fadvise(file, 0, 0, advice)


def buffer(size: int, *, direct: bool) -> memoryview:
    """Memory to read into, as it is best read into, or as O_DIRECT wants it."""
    return reader_process.buffer(size, 0 if direct else CACHE_LINE)
