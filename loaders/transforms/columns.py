"""The transform of a loader that is given none: a record's image and columns as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .contract import ArraySpec, TransformInput

IMAGE = "image"


@dataclass(frozen=True)
class AsColumns:
    """A transform to a dict of the values of ``names``: columns, and "image", the encoded bytes.

    ``rows`` are the arrays of the columns of which all values have one size; workers write them to rows of a
    batch. ``json`` are the columns of JSON. Picklable and thread-safe.
    """

    names: tuple[str, ...]
    rows: tuple[ArraySpec, ...] = ()
    json: tuple[str, ...] = ()

    @property
    def sent(self) -> tuple[str, ...]:
        """The names of the columns of which the values have different sizes."""
        written = {spec.name for spec in self.rows}
        return tuple(name for name in self.names if name not in written)

    def __call__(self, record: TransformInput, rng: np.random.Generator) -> dict[str, Any]:
        return _values(record, self.names)

    def write(self, record: TransformInput, rows: Mapping[str, npt.NDArray[Any]], row: int) -> object:
        """Write the record's values of one size to a row of each array; return the others, None without."""
        for spec in self.rows:
            rows[spec.name][row] = record.columns[spec.name]
        return _values(record, self.sent) or None


def _values(record: TransformInput, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: record.image if name == IMAGE else record.columns[name] for name in names}
