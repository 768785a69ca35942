"""The indexes of several datasets as one, of which nothing is copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.formats.containers.table import Rows
from shardprep.formats.dataset.index import index_dtype
from shardprep.formats.dataset.record_set import IndexRows

from .row_numbers import row_numbers


class ChainedIndex:
    """Indexes one after the other: their rows are gathered when they are asked for.

    ``shards`` are the numbers of the parts' shards. The column ``shard`` counts the shards of all parts, and
    keys have the width of the widest.
    """

    def __init__(self, parts: Sequence[IndexRows], shards: Sequence[int]) -> None:
        self._parts = parts
        self._ends = np.cumsum([len(part) for part in parts])
        self._firsts = self._ends - [len(part) for part in parts]
        self._first_shards = np.cumsum([0, *shards[:-1]]).astype(np.uint32)
        self._dtype = index_dtype(max(part.dtype["key"].itemsize for part in parts))

    @property
    def dtype(self) -> np.dtype[np.void]:
        """The columns of a row."""
        return self._dtype

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, wanted: Any, /) -> Any:
        if isinstance(wanted, str):
            return self._column(wanted)
        if isinstance(wanted, slice):
            return self._rows(np.arange(*wanted.indices(len(self))))
        rows = self._rows(row_numbers(wanted, len(self)))
        return rows if isinstance(wanted, (np.ndarray, list)) else rows[0]

    def _column(self, name: str) -> npt.NDArray[Any]:
        """Return a column of all rows."""
        found = np.empty(len(self), self._dtype[name])
        for part, start, stop, shard in zip(
            self._parts, self._firsts, self._ends, self._first_shards, strict=True
        ):
            found[start:stop] = part[name]
            if name == "shard":
                found[start:stop] += shard
        return found

    def _rows(self, numbers: npt.NDArray[np.int64]) -> Rows:
        """Return rows in any order: those of each part are read together."""
        rows = np.empty(len(numbers), self._dtype)
        parts = np.searchsorted(self._ends, numbers, side="right")
        for part in np.unique(parts):
            mine = np.flatnonzero(parts == part)
            found = self._parts[part][numbers[mine] - self._firsts[part]]
            for name in self._dtype.names or ():  # the keys' widths may differ
                rows[name][mine] = found[name]
            rows["shard"][mine] += self._first_shards[part]
        return rows
