"""Memory of arrays that were dropped, for those to come."""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
import numpy.typing as npt

from .memory import aligned

KEPT = 8  # pieces of memory that nobody uses
LEAST = 1 << 20  # bytes: what is smaller malloc has at hand


class Recycled:
    """``recycled(size)`` is :func:`.memory.aligned` memory that was used before, if there is some of this size.

    Fresh memory of a batch's size comes from the system page by page, which takes as long as to fill it. A piece
    comes back when it and every view of it are dropped, in whatever thread that happens. One thread asks.
    """

    def __init__(self) -> None:
        self._idle: deque[npt.NDArray[np.uint8]] = deque(maxlen=KEPT)

    def __call__(self, size: int) -> npt.NDArray[np.uint8]:
        if size < LEAST:
            return aligned(size)
        owner = self._found(size)
        lent = np.frombuffer(owner.data, np.uint8)  # views of it keep it, and not its owner
        weakref.finalize(lent, self._idle.append, owner).atexit = False
        return lent

    def _found(self, size: int) -> npt.NDArray[np.uint8]:
        for _ in range(len(self._idle)):
            memory = self._idle.popleft()
            if memory.size == size:
                return memory
            self._idle.append(memory)
        return aligned(size)
