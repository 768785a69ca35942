"""What a loader's workers make, as the parts of a batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from shardprep.loaders.batching.json_values import JsonValues
from shardprep.loaders.batching.stack import gathered
from shardprep.loaders.buffers.row_form import RowForm
from shardprep.loaders.engine.protocol.batch import EngineBatch
from shardprep.loaders.engine.protocol.task import Items
from shardprep.loaders.engine.protocol.written_rows import written_rows
from shardprep.loaders.engine.run import BatchRequest
from shardprep.loaders.transforms.columns import AsColumns
from shardprep.loaders.transforms.contract import Transform, outputs_of


class DeclaredResults:
    """The arrays that a transform declares."""

    def request(self, items: Items) -> BatchRequest:
        """Return what an engine is asked for."""
        return BatchRequest(items)

    def parts(self, batch: EngineBatch, skipped: Sequence[int]) -> list[Any]:
        """Return a batch's parts, without the rows that were skipped."""
        return without(skipped, batch.arrays.values())


class EncodedImages(DeclaredResults):
    """A list of the encoded images, without a transform."""

    def parts(self, batch: EngineBatch, skipped: Sequence[int]) -> list[Any]:
        return [list(batch.payloads.values())]


class FoundResults(DeclaredResults):
    """The results of a transform that declares no outputs.

    Their form is found in the first batch of which all results have one. From then on the workers write
    results of that form to rows of the slot's input area, of ``room`` bytes. The parts of a batch depend on
    its own results only, and not on when the form was found.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._form: RowForm | None = None

    def request(self, items: Items) -> BatchRequest:
        rows = written_rows(self._form, items, at=0, room=self._room) if self._form else None
        return BatchRequest(items, ((rows.at, rows.form),), rows.arrays) if rows else BatchRequest(items)

    def parts(self, batch: EngineBatch, skipped: Sequence[int]) -> list[Any]:
        found = self._together(batch, skipped)
        return list(found) if isinstance(found, tuple) else [found]

    def _together(self, batch: EngineBatch, skipped: Sequence[int]) -> Any:
        if self._form and not batch.payloads:
            arrays = dict(zip(batch.arrays, without(skipped, batch.arrays.values()), strict=True))
            return self._form.made_of(arrays or self._form.no_rows())
        results = [self._result(batch, row) for row in range(len(batch.items)) if row not in batch.skipped]
        if self._form is None and results:
            self._form = _common_form(results)
        return gathered(results)

    def _result(self, batch: EngineBatch, row: int) -> Any:
        if row in batch.payloads or self._form is None:
            return batch.payloads[row]
        return self._form.made_of({name: array[row, ...] for name, array in batch.arrays.items()})


class ColumnResults(DeclaredResults):
    """A dict of the columns of a batch.

    Columns of one size are arrays; of the others, arrays are stacked where their dtypes and shapes agree, and
    all else is a list.
    """

    def __init__(self, columns: AsColumns) -> None:
        self._columns = columns
        self._written = [spec.name for spec in columns.rows]

    def parts(self, batch: EngineBatch, skipped: Sequence[int]) -> list[Any]:
        arrays = dict(
            zip(self._written, without(skipped, map(batch.arrays.__getitem__, self._written)), strict=True)
        )
        rows: list[Any] = list(batch.payloads.values())
        return [
            {name: arrays[name] if name in arrays else self._sent(rows, name) for name in self._columns.names}
        ]

    def _sent(self, rows: list[Any], name: str) -> Any:
        values = [row[name] for row in rows]
        return JsonValues(values) if name in self._columns.json else _stacked(values)


def _stacked(values: list[Any]) -> Any:
    forms = {(each.shape, each.dtype) if isinstance(each, np.ndarray) else None for each in values}
    return np.stack(values) if len(forms) == 1 and None not in forms else values


def results_of(transform: Transform | None, *, room: int) -> DeclaredResults:
    """Return what makes the parts; workers have ``room`` bytes for rows of a form that is found."""
    if transform is None:
        return EncodedImages()
    if isinstance(transform, AsColumns):
        return ColumnResults(transform)
    return FoundResults(room) if outputs_of(transform) is None else DeclaredResults()


def without(skipped: Sequence[int], arrays: Iterable[Any]) -> list[Any]:
    """Return the arrays without these rows."""
    return [np.delete(array, skipped, axis=0) if len(skipped) else array for array in arrays]


def _common_form(results: Sequence[Any]) -> RowForm | None:
    """The form that all results have; None if they differ."""
    form = None if isinstance(results[0], list) else RowForm.of(results[0])
    return form if form and all(form.arrays_of(result) for result in results) else None
