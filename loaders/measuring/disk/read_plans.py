"""The bytes that a pass reads, and their order: forward through the files, or at random places."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MAX_SPAN = min(1 << 30, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 8)
MAX_READS = 4096  # of a random pass, so that checking that they are cold is quick
PAGE = 4096  # bytes; O_DIRECT reads whole pages

Numbers = npt.NDArray[np.int64]

Piece = tuple[int, int]
"""The number of a file, and an offset in it."""


@dataclass(frozen=True, eq=False)
class ReadPlan:
    """Pieces of ``block`` bytes, or of the rest of their file, to be read by ``depth`` processes at once.

    ``ahead`` is how many pieces are requested before they are read.
    """

    pieces: list[Piece]
    block: int
    depth: int = 1
    random: bool = False
    ahead: int = 0


@dataclass
class Cursor:
    """The share of the files before the next pass, 0 to 1."""

    share: float = 0.0


class Forward:
    """Sequential passes that continue where the last one ended.

    So a disk does not read from its own cache. ``cursor`` may be shared by several block sizes. Not
    thread-safe.
    """

    def __init__(self, sizes: Sequence[int], block: int, cursor: Cursor, *, ahead: int = 0) -> None:
        self._total = sum(sizes)
        self._ends = np.cumsum(-(-np.array(sizes, np.int64) // block))
        self._block = block
        self._cursor = cursor
        self._ahead = ahead

    def next(self) -> ReadPlan:
        """Return the blocks in stored order from the cursor on, cyclically; at most MAX_SPAN bytes."""
        total = int(self._ends[-1])
        count = max(1, min(total, MAX_SPAN // self._block))
        first = int(self._cursor.share * total)
        numbers = (first + np.arange(count)) % total
        return ReadPlan(_pieces(self._ends, numbers, self._block), self._block, ahead=self._ahead)

    def passed(self, read: int) -> None:
        """Move the cursor by the ``read`` bytes that were read of the plan."""
        self._cursor.share = (self._cursor.share + read / self._total) % 1.0


class Scattered:
    """Random passes: blocks of one size, each at most once, anywhere in the files, in a new order."""

    def __init__(self, sizes: Sequence[int], record_bytes: int, *, depth: int) -> None:
        self.block = -(-record_bytes // PAGE) * PAGE
        self._ends = np.cumsum(np.maximum(1, np.array(sizes, np.int64) // self.block))
        self._depth = depth
        self._rng = np.random.default_rng()

    def next(self) -> ReadPlan:
        """Return a plan of at most :data:`MAX_READS` reads and :data:`MAX_SPAN` bytes."""
        total = int(self._ends[-1])
        count = max(1, min(total, MAX_READS, MAX_SPAN // self.block))
        numbers = self._rng.choice(total, count, replace=False)
        return ReadPlan(_pieces(self._ends, numbers, self.block), self.block, depth=self._depth, random=True)

    def passed(self, read: int) -> None:
        """Do nothing: the next pass has new places."""


def _pieces(ends: Numbers, numbers: Numbers, block: int) -> list[Piece]:
    """The pieces of the blocks with these numbers; ``ends`` counts the blocks up to each file's end."""
    files = np.searchsorted(ends, numbers, side="right")
    starts = np.concatenate((np.zeros(1, np.int64), ends))[files]
    return list(zip(files.tolist(), ((numbers - starts) * block).tolist(), strict=True))
