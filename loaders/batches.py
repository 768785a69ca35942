"""What an engine yields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Self

from .payloads import Parcel
from .slots import Arrays, CargoArrays, Memory, SlotLayout
from .work import Items, Skipped


@dataclass(frozen=True, eq=False)
class Batch:
    """``items`` as they were planned, the ``number``-th of the run, and what became of them.

    Each array of ``arrays`` has one row per item, is writable, starts on 64 bytes and never changes while
    any view of it is held; a row in ``skipped`` (which gives its reason) holds anything. ``payloads`` are
    what rows returned beside their arrays: memoryviews and arrays lie in the same memory, and keep it.
    Both dictionaries are in the order of rows.
    """

    number: int
    items: Items
    arrays: Arrays
    payloads: dict[int, object]
    skipped: dict[int, str]
    payload_bytes: int = 0

    @classmethod
    def assemble(
        cls,
        number: int,
        items: Items,
        *,
        layout: SlotLayout,
        memory: Memory,
        parcels: Sequence[Parcel],
        written: CargoArrays | None = None,
        copied: bool = False,
    ) -> Self:
        """The batch that lies in ``memory``, or was ``copied`` out of it."""
        payloads: dict[int, object] = {}
        skipped: dict[int, str] = {}
        for parcel in sorted(parcels, key=attrgetter("first")):
            for row, outcome in parcel.unpack(
                layout.spare_bytes(memory, parcel.first, parcel.count), copied=copied
            ):
                if isinstance(outcome, Skipped):
                    skipped[row] = outcome.reason
                else:
                    payloads[row] = outcome
        arrays = (layout.copied_arrays if copied else layout.arrays)(memory, len(items))
        if written is not None:
            arrays |= (written.copied if copied else written.arrays)(layout.cargo_bytes(memory))
        return cls(number, items, arrays, payloads, skipped, sum(parcel.nbytes for parcel in parcels))
