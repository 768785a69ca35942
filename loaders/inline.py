"""The same work in the calling thread, for debugging: no process, no shared memory, the same batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .batches import Batch
from .memory import aligned
from .payloads import Packer, Parcel
from .slots import Arrays, SlotLayout
from .work import Fill, Items, outcomes

Where = Callable[[int, int, Any], str]  # row, number of its batch, item


def fill_batch(fill: Fill, number: int, items: Items, *, layout: SlotLayout, where: Where) -> Batch:
    """A batch in memory of its own; an exception of the work gets a note that says ``where``."""
    memory, rows = aligned(layout.nbytes), len(items)
    packer = Packer(layout.spare_bytes(memory, 0, rows))
    try:
        _pack(packer, fill, items, layout.arrays(memory, rows))
    except Exception as error:
        row = min(packer.rows, rows - 1)
        error.add_note(f"In the calling thread, {where(row, number, items[row])}")
        raise
    parcel = Parcel(0, rows, memoryview(b"".join(packer.parts())))
    return Batch.assemble(number, items, layout=layout, memory=memory, parcels=[parcel])


def _pack(packer: Packer, fill: Fill, items: Items, arrays: Arrays) -> None:
    for outcome in outcomes(fill, items, arrays, packer.room):
        packer.add(outcome)
