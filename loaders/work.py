"""What a caller gives an engine to do, row by row, in its workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..formats.errors import UsageError
from ..formats.shard import Room
from .slots import Arrays

Items = npt.NDArray[Any]
Clock = npt.NDArray[np.float64]
Fill = Callable[[Items, Arrays, Room], Iterable[object]]
"""Fills one array row per item and yields each row's outcome when the row is finished.

``arrays`` are views of the items' rows, which must not be kept; CARGO among them is all the slot's cargo,
where its layout has some. An outcome is None (the row is written),
:class:`Skipped` (it is not), or a payload that has no fixed size: bytes or an array, delivered as a
memoryview or an aligned array, or any picklable object, whose arrays are aligned; Whole says that a payload
is such an object, though it be bytes, and Pickled is one that was pickled already. A payload is copied as it is yielded: its buffer may be used again.

``room(size)`` gives uint8 [size] to make the row's payload in: the very array, yielded for that row, is
delivered as bytes, as a rule without a copy. It is good until the row's outcome is yielded, or room is
asked for again; what is not yielded is not used up.
"""


@dataclass(frozen=True)
class Skipped:
    """The outcome of a row that was left out; what its arrays hold there is undefined."""

    reason: str


@dataclass(frozen=True)
class Whole:
    """An outcome that is delivered as what it is: bytes, or a subclass of an array."""

    value: object


class Work(Protocol):
    """Picklable; opened once in each worker. An item is a fixed-size numpy value, at most 32 KiB.

    ``stages`` names what the work times: it adds seconds to ``clock[i]`` for ``stages[i]``. Opening is the
    place to limit the threads of libraries (``cv2.setNumThreads(0)``), for the engine knows none.
    """

    @property
    def item_dtype(self) -> np.dtype[Any]: ...

    @property
    def stages(self) -> tuple[str, ...]: ...

    def open(self, clock: Clock) -> AbstractContextManager[Fill]:
        """Make ready in the process that does the work; leaving the context cleans up."""


_NOTHING = object()


def outcomes(fill: Fill, items: Items, arrays: Arrays, room: Room) -> Iterator[object]:
    """One outcome per item, or UsageError: a fill that yields fewer or more has lost its place."""
    yielded = iter(fill(items, arrays, room))
    for row in range(len(items)):
        outcome = next(yielded, _NOTHING)
        if outcome is _NOTHING:
            raise UsageError(f"fill yielded {row} outcomes for {len(items)} rows; yield one for each")
        yield outcome
    if next(yielded, _NOTHING) is not _NOTHING:
        raise UsageError(
            f"fill yielded more outcomes than the {len(items)} rows it was given; yield one for each"
        )
