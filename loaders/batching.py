"""Records to batches, in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..formats.errors import UsageError
from .memory import aligned
from .passes import Passes, Source, end

Remainder = Literal["keep", "drop"]


class Batches:
    """Each ``batch_size`` records of ``records``, stacked: arrays, or tuples or dicts of arrays or numbers.

    Every array is fresh, contiguous and starts on 64 bytes. ``remainder`` says what becomes of a last batch
    that is not full. Raises UsageError where records differ in shape, dtype or form.
    """

    batches_never_change = True

    def __init__(self, records: Source, batch_size: int, *, remainder: Remainder = "keep") -> None:
        if batch_size < 1 or remainder not in ("keep", "drop"):
            raise UsageError(
                f"batch_size={batch_size}, remainder={remainder!r}: at least 1, and 'keep' or 'drop'"
            )
        self._records = Passes(records)
        self._batch_size = batch_size
        self._remainder = remainder

    def __len__(self) -> int:
        full, rest = divmod(len(self._records), self._batch_size)
        return full + (rest > 0 and self._remainder == "keep")

    def __iter__(self) -> Iterator[Any]:
        records = self._records.begin()
        try:
            while rows := list(islice(records, self._batch_size)):
                if len(rows) < self._batch_size and self._remainder == "drop":
                    return
                yield stack(rows)
        finally:
            end(records)


def stack(records: Sequence[Any]) -> Any:
    """Equal records as one with a first axis more. Raises UsageError where they are not equal in form."""
    first = records[0]
    if any(type(record) is not type(first) for record in records):
        raise UsageError(
            f"records of one batch have different forms: {sorted({type(r).__name__ for r in records})}"
        )
    if isinstance(first, Mapping):
        _same({tuple(record) for record in records}, "names")
        return {name: stack([record[name] for record in records]) for name in first}
    if isinstance(first, tuple | list):
        _same({len(record) for record in records}, "numbers of parts")
        return tuple(map(stack, zip(*records, strict=True)))
    return _stacked([np.asarray(record) for record in records])


def _stacked(rows: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    _same({row.shape for row in rows}, "shapes")
    _same({row.dtype.str for row in rows}, "dtypes")
    dtype, shape = rows[0].dtype, (len(rows), *rows[0].shape)
    if dtype.kind not in "biufc":
        raise UsageError(f"records of dtype {dtype} cannot be stacked; turn them into numbers")
    batch = aligned(len(rows) * rows[0].nbytes).view(dtype).reshape(shape)
    return np.stack(rows, out=batch)


def _same(found: set[Any], what: str) -> None:
    if len(found) > 1:
        raise UsageError(f"records of one batch have different {what}: {sorted(map(str, found))}")
