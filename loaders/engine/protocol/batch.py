"""The batches that an engine yields."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Self

from shardprep.loaders.buffers.memory import aligned
from shardprep.loaders.buffers.slots import Arrays, InputAreaArrays, Memory, SlotLayout

from .payloads import LeaseOutcomes, OutcomeWriter
from .task import Fill, Items, Skipped, outcomes


@dataclass(frozen=True, eq=False)
class EngineBatch:
    """The ``number``-th batch of a run: its ``items`` as they were planned, and their outcomes.

    Each array of ``arrays`` has one row per item, is writable, starts at a multiple of 64 bytes and does not
    change while a view of it is held. ``skipped`` maps rows that were left out to the reason; their contents
    are undefined. ``payloads`` maps rows to what they returned beside their arrays: memoryviews and arrays
    lie in the same memory, and keep it. Both dictionaries are in the order of rows.
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
        lease_outcomes: Sequence[LeaseOutcomes],
        written: InputAreaArrays | None = None,
        copied: bool = False,
    ) -> Self:
        """Return the batch that lies in ``memory``, or one ``copied`` out of it."""
        payloads: dict[int, object] = {}
        skipped: dict[int, str] = {}
        for part in sorted(lease_outcomes, key=attrgetter("first")):
            for row, outcome in part.unpack(
                layout.spare_bytes(memory, part.first, part.count), copied=copied
            ):
                if isinstance(outcome, Skipped):
                    skipped[row] = outcome.reason
                else:
                    payloads[row] = outcome
        arrays = (layout.copied_arrays if copied else layout.arrays)(memory, len(items))
        if written is not None:
            arrays |= (written.copied if copied else written.arrays)(layout.input_area(memory))
        return cls(number, items, arrays, payloads, skipped, sum(part.nbytes for part in lease_outcomes))


Where = Callable[[int, int, Any], str]  # row, number of its batch, item


def fill_batch(fill: Fill, number: int, items: Items, *, layout: SlotLayout, where: Where) -> EngineBatch:
    """Fill a batch in new memory; an exception of the work gets a note that says ``where``."""
    memory, rows = aligned(layout.nbytes), len(items)
    packer = OutcomeWriter(layout.spare_bytes(memory, 0, rows))
    try:
        _pack(packer, fill, items, layout.arrays(memory, rows))
    except Exception as error:
        row = min(packer.rows, rows - 1)
        error.add_note(f"In the calling thread, {where(row, number, items[row])}")
        raise
    part = LeaseOutcomes(0, rows, memoryview(b"".join(packer.parts())))
    return EngineBatch.assemble(number, items, layout=layout, memory=memory, lease_outcomes=[part])


def _pack(packer: OutcomeWriter, fill: Fill, items: Items, arrays: Arrays) -> None:
    for outcome in outcomes(fill, items, arrays, packer.room):
        packer.add(outcome)
