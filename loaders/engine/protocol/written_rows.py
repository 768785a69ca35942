"""Rows of a form that was found in results: workers write them to the input area of a batch's slot."""

from __future__ import annotations

from typing import Any, NamedTuple

from shardprep.loaders.buffers.memory import ALIGNMENT
from shardprep.loaders.buffers.pickling import Pickled, unpickled
from shardprep.loaders.buffers.row_form import RowForm
from shardprep.loaders.buffers.slots import InputAreaArrays, Memory, SlotLayout

from .task import Items

# Columns of an item: its row of the batch's rows, and the position of their form, behind which they lie.
ROW_COLUMNS = [("row", "<u4"), ("rows", "<u4"), ("form_at", "<u8"), ("form_size", "<u8")]


class WrittenRows(NamedTuple):
    """The form of a batch's rows as an input ``at`` an offset of the input area, and the rows' arrays."""

    at: int
    form: Pickled
    arrays: InputAreaArrays


def written_rows(form: RowForm, items: Items, *, at: int, room: int) -> WrittenRows | None:
    """Return the rows of a batch of ``items``, and name them in the items' columns.

    They lie from ``at`` on in an input area of ``room`` bytes; None if they do not fit.
    """
    piece = Pickled.of(form)
    arrays = _rows_behind(form, at + piece.size, len(items))
    if arrays.at + arrays.layout.nbytes > room:
        return None
    items["row"], items["rows"] = range(len(items)), len(items)
    items["form_at"], items["form_size"] = at, piece.size
    return WrittenRows(at, piece, arrays)


class RowWriter:
    """The rows that a worker writes the results of a lease to, in the ``inputs`` area of its slot."""

    def __init__(self, items: Items, inputs: Memory | None) -> None:
        self._form: RowForm | None = None
        if inputs is not None and len(items) and items[0]["form_size"]:
            at, size, rows = (int(items[0][name]) for name in ("form_at", "form_size", "rows"))
            form = self._form = unpickled(inputs[at : at + size], copied=True)
            self._arrays = list(_rows_behind(form, at + size, rows).arrays(inputs).values())

    def write(self, result: Any, row: int) -> bool:
        """Write a result to this row of the batch. False if the rows have no form, or another one."""
        parts = self._form.arrays_of(result) if self._form else None
        if parts is None:
            return False
        for array, part in zip(self._arrays, parts, strict=True):
            array[row] = part
        return True


def _rows_behind(form: RowForm, end: int, rows: int) -> InputAreaArrays:
    """The arrays of so many rows, behind what ends at ``end``."""
    return InputAreaArrays(SlotLayout(rows, form.fields), -(-end // ALIGNMENT) * ALIGNMENT)
