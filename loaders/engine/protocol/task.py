"""The work that a caller gives an engine, done row by row in its workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from shardprep.formats.containers.container import Room
from shardprep.formats.errors import UsageError
from shardprep.loaders.buffers.slots import Arrays

Items = npt.NDArray[Any]
Clock = npt.NDArray[np.float64]
Fill = Callable[[Items, Arrays, Room], Iterable[object]]
"""Function of (items, arrays, room) that fills one array row per item and yields each row's outcome.

``arrays`` are views of the items' rows, which must not be kept; INPUTS among them is the slot's input area,
if its layout has one. An outcome is None (the row is written), :class:`Skipped` (it is not), or a payload
that has no fixed size: bytes or an array, delivered as a memoryview or an aligned array, or any picklable
object, with aligned arrays. AsObject marks a payload as such an object even if it is bytes; Pickled is an
object that is pickled already. A payload is copied when it is yielded: its buffer may be used again.

``room(size)`` returns uint8 [size] to make the row's payload in. If that same array is yielded for that row,
it is delivered as bytes, usually without a copy. It is valid until the row's outcome is yielded or room is
called again; memory that is not yielded is not used up.
"""


@dataclass(frozen=True)
class Skipped:
    """The outcome of a row that was left out; the contents of its arrays are undefined."""

    reason: str


@dataclass(frozen=True)
class AsObject:
    """An outcome that is delivered unchanged: bytes, or an instance of a subclass of ndarray."""

    value: object


class RowTask(Protocol):
    """The work of an engine: picklable, opened once in each worker.

    An item is a numpy value of fixed size, at most 32 KiB. ``stages`` names what the work times: it adds
    seconds to ``clock[i]`` for ``stages[i]``. Limit the threads of libraries when the work is opened
    (``cv2.setNumThreads(0)``): the engine does not.
    """

    @property
    def item_dtype(self) -> np.dtype[Any]: ...

    @property
    def stages(self) -> tuple[str, ...]: ...

    def open(self, clock: Clock) -> AbstractContextManager[Fill]:
        """Prepare the process that does the work; leaving the context cleans up."""


_NOTHING = object()


def outcomes(fill: Fill, items: Items, arrays: Arrays, allocate: Room) -> Iterator[object]:
    """Yield one outcome per item. Raises UsageError where ``fill`` yields fewer or more."""
    yielded = iter(fill(items, arrays, allocate))
    for row in range(len(items)):
        outcome = next(yielded, _NOTHING)
        if outcome is _NOTHING:
            raise UsageError(f"fill yielded {row} outcomes for {len(items)} rows; yield one for each")
        yield outcome
    if next(yielded, _NOTHING) is not _NOTHING:
        raise UsageError(
            f"fill yielded more outcomes than the {len(items)} rows it was given; yield one for each"
        )
