"""Groups of items to send to worker processes: large enough to be efficient, without waiting for items."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import numpy as np

from shardprep.formats.errors import UsageError
from shardprep.loaders.buffers.memory import ALIGNMENT
from shardprep.loaders.buffers.pickling import Pickled, unpickled
from shardprep.loaders.buffers.row_form import RowForm
from shardprep.loaders.buffers.slots import Memory
from shardprep.loaders.engine.protocol.written_rows import ROW_COLUMNS, written_rows
from shardprep.loaders.engine.run import BatchRequest

# An item's position in the inputs, and its row.
ITEM = np.dtype([("pass", "<u8"), ("number", "<u8"), ("at", "<u8"), ("size", "<u8"), *ROW_COLUMNS])
GROUP_WORK_S = 0.05  # time that all workers should need for a group, so that its messages cost little
GROUP_TIMEOUT_S = 0.02  # time after which a group that is not full is sent, where items come slowly
GROUP_BYTES = 64 << 20  # bytes of items or results at which a group is full, so that slots stay small

Numbered = Iterator[tuple[Any, int]]  # an item, and its number


class ItemGroups:
    """The ``numbered`` items in groups of at most ``rows``; iterating yields a BatchRequest for each group.

    Groups grow from ``least`` items with the rate at which results are :meth:`delivered`; with ``least`` =
    ``rows`` all groups but the last are full. After ``form``, the form of the results, is set, the workers
    write the rows of a batch. Items are copied when they are drawn, unless they ``never_change``. An
    exception of ``numbered`` is raised after the group before it. Raises UsageError for an item that cannot
    be sent.
    """

    def __init__(
        self,
        numbered: Numbered,
        *,
        pass_number: int,
        rows: int,
        least: int,
        max_bytes: int,
        never_change: bool,
    ) -> None:
        self._numbered = numbered
        self._pass = pass_number
        self.rows, self._least, self._max_bytes = rows, min(least, rows), max_bytes
        self._never_change = never_change
        self.form: RowForm | None = None
        self.forms: deque[RowForm | None] = deque()  # one for each request
        self._began = perf_counter()
        self._delivered = self._bytes = 0

    def delivered(self, items: int, nbytes: int) -> None:
        """Count results, and the bytes that they took."""
        self._delivered += items
        self._bytes += nbytes

    def __iter__(self) -> Iterator[BatchRequest]:
        ended = False
        while not ended:
            group, failure = _Group(self._pass, self._max_bytes), None
            try:
                ended = self._fill(group)
            except Exception as error:  # raised after the items before it were sent
                ended, failure = True, error
            if group.items:
                request = group.request(self.form)
                self.forms.append(self.form if request.written else None)
                yield request
            if failure is not None:
                raise failure

    def _fill(self, group: _Group) -> bool:
        """Add items to the group. Returns whether there are no more items."""
        size, full_at = self._size(), perf_counter() + GROUP_TIMEOUT_S
        for item, number in self._numbered:
            group.add(number, item, copied=not self._never_change)
            if len(group.items) >= size or (size < self.rows and group.is_enough(full_at)):
                return False
        return True

    def _size(self) -> int:
        """The size of the next group: ``least`` times a power of two, so that slots seldom change layout."""
        worth = GROUP_WORK_S / max(1e-9, perf_counter() - self._began)
        wanted = self._delivered * min(worth, GROUP_BYTES / max(1, self._bytes))
        size = self._least
        while size * 2 <= min(wanted, self.rows):
            size *= 2
        return size


class _Group:
    def __init__(self, pass_number: int, max_bytes: int) -> None:
        self.items: list[tuple[int, int, int, int]] = []
        self._inputs: list[tuple[int, Pickled]] = []
        self._pass = pass_number
        self._max_bytes = max_bytes
        self._end = 0

    def add(self, number: int, item: object, *, copied: bool) -> None:
        try:
            piece = Pickled.of(item, copied=copied)
        except Exception as error:
            raise UsageError(
                f"item {number}, a {type(item).__name__}, cannot be sent to another process: {error}. Create it in "
                "the function, from values that can be sent"
            ) from error
        if self._end + piece.size > self._max_bytes:
            raise UsageError(
                f"item {number} has {piece.size / 2**30:.1f} GiB; with the other items of its group that exceeds "
                f"the limit of {self._max_bytes / 2**30:.0f} GiB. Read its data in the function"
            )
        self.items.append((self._pass, number, self._end, piece.size))
        self._inputs.append((self._end, piece))
        self._end += -(-piece.size // ALIGNMENT) * ALIGNMENT

    def is_enough(self, full_at: float) -> bool:
        return self._end >= GROUP_BYTES or perf_counter() >= full_at

    def request(self, form: RowForm | None) -> BatchRequest:
        items = np.zeros(len(self.items), ITEM)
        for column, values in zip(
            ("pass", "number", "at", "size"), zip(*self.items, strict=True), strict=True
        ):
            items[column] = values
        rows = written_rows(form, items, at=self._end, room=self._max_bytes) if form else None
        if rows is None:
            return BatchRequest(items, tuple(self._inputs))
        return BatchRequest(items, (*self._inputs, (rows.at, rows.form)), rows.arrays)


def received(inputs: Memory, at: int, size: int) -> Any:
    """Unpickle the item at ``at``. Its arrays are writable copies, so that a second try sees the original."""
    return unpickled(inputs[at : at + size], copied=True)
