"""Reading a plan's pieces with preadv(2), one at a time or by ``depth`` processes.

Processes, because sixteen threads that share the GIL read a third less from memory than the same number of
threads of a C program.
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

from shardprep.formats.errors import WorkerDied
from shardprep.formats.processes.child_process import START_TIMEOUT_S

from . import reader_process
from .read_plans import Piece, ReadPlan
from .reader_process import ANSWER, ORDER, REPORT

# A copy to the start of a page is up to a tenth slower on some processors (source and target then share their
# low address bits), a copy to 16 bytes past a page, as from malloc, on others; only O_DIRECT needs whole
# pages.
CACHE_LINE = 64


class Reading(NamedTuple):
    """The bytes read, the seconds that took, and the pieces."""

    size: int
    seconds: float
    pieces: list[Piece]

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.size / max(self.seconds, 1e-9)


def read(files: Sequence[int], plan: ReadPlan, *, seconds: float, direct: bool = False) -> Reading:
    """Read the pieces in order for at most ``seconds``; each process reads at least one.

    ``files`` are descriptors, opened with O_DIRECT if ``direct``. Raises OSError, and WorkerDied where a
    reading process is killed, or takes START_TIMEOUT_S longer than ``seconds``. Any other exception (Ctrl-C)
    ends the processes.
    """
    advise(files, plan)
    if plan.depth > 1:
        return _read_at_once(files, plan, seconds, direct=direct)
    return _read_in_turn(files, plan, seconds, direct=direct)


def _read_in_turn(files: Sequence[int], plan: ReadPlan, seconds: float, *, direct: bool) -> Reading:
    into, size, count = [buffer(plan.block, direct=direct)], 0, 0
    began = time.perf_counter()
    deadline = began + seconds
    _request(files, plan, 0, plan.ahead)
    for file, offset in plan.pieces:
        count += 1
        if plan.ahead:
            _request(files, plan, count - 1 + plan.ahead, 1)
        size += os.preadv(files[file], into, offset)
        if time.perf_counter() >= deadline:
            break
    return Reading(size, time.perf_counter() - began, plan.pieces[:count])


def _read_at_once(files: Sequence[int], plan: ReadPlan, seconds: float, *, direct: bool) -> Reading:
    """Read every ``depth``-th piece in each process, timed until the last process ends."""
    depth = min(plan.depth, len(plan.pieces))
    order = ORDER.pack(depth, plan.block, 0 if direct else CACHE_LINE, seconds)
    flat = array.array("q", [part for file, offset in plan.pieces for part in (files[file], offset)])
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", str(Path(reader_process.__file__))],
            input=order + flat.tobytes(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=files,
            process_group=0,  # only this process receives Ctrl-C
            timeout=START_TIMEOUT_S + seconds,
        )
    except subprocess.TimeoutExpired as late:
        raise WorkerDied(
            f"the reading processes took longer than {late.timeout:g} s; check whether the disk hangs"
        ) from late
    if done.returncode or len(done.stdout) != ANSWER.size + depth * REPORT.size:
        raise WorkerDied("a reading process ended early; check whether the system is out of memory")
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


def _request(files: Sequence[int], plan: ReadPlan, first: int, count: int) -> None:
    if hasattr(os, "posix_fadvise"):
        for file, offset in plan.pieces[first : first + count]:
            os.posix_fadvise(files[file], offset, plan.block, os.POSIX_FADV_WILLNEED)


def advise(files: Sequence[int], plan: ReadPlan) -> None:
    """Advise the kernel of the access pattern of the plan."""
    if hasattr(os, "posix_fadvise"):
        advice = os.POSIX_FADV_RANDOM if plan.random else os.POSIX_FADV_SEQUENTIAL
        for file in files:
            os.posix_fadvise(file, 0, 0, advice)


def buffer(size: int, *, direct: bool) -> memoryview:
    """Return a buffer at a fast alignment, or at the one that O_DIRECT needs."""
    return reader_process.buffer(size, 0 if direct else CACHE_LINE)
