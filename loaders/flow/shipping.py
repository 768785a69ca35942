"""Items on their way to worker processes, in groups that are worth sending and not waited for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import numpy as np

from ...formats.errors import UsageError
from ..memory import ALIGNMENT
from ..pickled import Pickled, unpickled
from ..plans import Shipment
from ..slots import CargoArrays, Memory, SlotLayout
from ..work import Items
from .form import Form

# An item's place in the cargo, its row, and where the form of the rows is, which are written behind that.
ITEM = np.dtype(
    [
        ("pass", "<u8"),
        ("number", "<u8"),
        ("at", "<u8"),
        ("size", "<u8"),
        ("row", "<u4"),
        ("rows", "<u4"),
        ("form_at", "<u8"),
        ("form_size", "<u8"),
    ]
)
WORTH = 0.05  # seconds of all workers' time that a group should be, for its messages to cost nothing
PATIENCE = 0.02  # seconds after which a group is sent that is not full, where items come slowly
GROUP_BYTES = 64 << 20  # of items or of results, from which on a group is full, so that slots stay small

Numbered = Iterator[tuple[Any, int]]  # an item, and its number


class Shipping:
    """Iterating it yields a Shipment for each group of ``numbered`` items, of at most ``rows``.

    Groups grow from ``least`` with the rate at which results are :meth:`delivered`; with ``least`` = ``rows`` all
    are full but the last. Once the results' ``form`` is set workers write the rows of a batch. Unless the items
    ``never_change`` they are copied when they are drawn. What the items' iterator raises comes after the group
    before it. Raises UsageError for an item that cannot be sent.
    """

    def __init__(
        self, numbered: Numbered, *, pass_number: int, rows: int, least: int, room: int, never_change: bool
    ) -> None:
        self._numbered = numbered
        self._pass = pass_number
        self.rows, self._least, self._room = rows, min(least, rows), room
        self._never_change = never_change
        self.form: Form | None = None
        self.forms: deque[Form | None] = deque()  # of the shipments that were made
        self._began = perf_counter()
        self._delivered = self._bytes = 0

    def delivered(self, items: int, nbytes: int) -> None:
        """So many results have come, which took so many bytes."""
        self._delivered += items
        self._bytes += nbytes

    def __iter__(self) -> Iterator[Shipment]:
        ended = False
        while not ended:
            group, failure = _Group(self._pass, self._room), None
            try:
                ended = self._fill(group)
            except Exception as error:  # raised when what came before it is sent
                ended, failure = True, error
            if group.items:
                shipment = group.shipment(self.form)
                self.forms.append(self.form if shipment.written else None)
                yield shipment
            if failure is not None:
                raise failure

    def _fill(self, group: _Group) -> bool:
        """Whether there are no more items."""
        size, full_at = self._size(), perf_counter() + PATIENCE
        for item, number in self._numbered:
            group.add(number, item, copied=not self._never_change)
            if len(group.items) >= size or (size < self.rows and group.is_enough(full_at)):
                return False
        return True

    def _size(self) -> int:
        """A power of two times the least, so that groups seldom lie differently in their slots."""
        worth = WORTH / max(1e-9, perf_counter() - self._began)
        wanted = self._delivered * min(worth, GROUP_BYTES / max(1, self._bytes))
        size = self._least
        while size * 2 <= min(wanted, self.rows):
            size *= 2
        return size


class _Group:
    def __init__(self, pass_number: int, room: int) -> None:
        self.items: list[tuple[int, int, int, int]] = []
        self._cargo: list[tuple[int, Pickled]] = []
        self._pass = pass_number
        self._room = room
        self._end = 0

    def add(self, number: int, item: object, *, copied: bool) -> None:
        try:
            piece = Pickled.of(item, copied=copied)
        except Exception as error:
            raise UsageError(
                f"item {number}, a {type(item).__name__}, cannot be sent to another process: {error}. Have the "
                "function make it, from what can be sent"
            ) from error
        if self._end + piece.size > self._room:
            raise UsageError(
                f"item {number} has {piece.size / 2**30:.1f} GiB, with those sent together {self._room / 2**30:.0f} "
                "GiB or more, which is more than is sent at once; have the function read it"
            )
        self.items.append((self._pass, number, self._end, piece.size))
        self._cargo.append((self._end, piece))
        self._end += -(-piece.size // ALIGNMENT) * ALIGNMENT

    def is_enough(self, full_at: float) -> bool:
        return self._end >= GROUP_BYTES or perf_counter() >= full_at

    def shipment(self, form: Form | None) -> Shipment:
        items = np.zeros(len(self.items), ITEM)
        for column, values in zip(
            ("pass", "number", "at", "size"), zip(*self.items, strict=True), strict=True
        ):
            items[column] = values
        written = self._written(form, items) if form else None
        return Shipment(items, tuple(self._cargo), written)

    def _written(self, form: Form, items: Items) -> CargoArrays | None:
        """Where the rows are to be written, if there is room for them."""
        piece = Pickled.of(form)
        written = rows_behind(form, self._end, piece.size, len(items))
        if written.at + written.layout.nbytes > self._room:
            return None
        items["row"], items["rows"] = range(len(items)), len(items)
        items["form_at"], items["form_size"] = self._end, piece.size
        self._cargo.append((self._end, piece))
        return written


def rows_behind(form: Form, at: int, size: int, rows: int) -> CargoArrays:
    """The arrays of so many rows behind the form that lies there."""
    return CargoArrays(SlotLayout(rows, form.fields), -(-(at + size) // ALIGNMENT) * ALIGNMENT)


def received(cargo: Memory, at: int, size: int) -> Any:
    """The item that lies there; its arrays are writable and its own, lest a second try sees what the first did."""
    return unpickled(cargo[at : at + size], copied=True)
