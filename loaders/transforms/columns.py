"""The transform of a loader that is given none: a record's image and columns as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .contract import TransformInput

IMAGE = "image"


@dataclass(frozen=True)
class AsColumns:
    """A transform to a dict of the values of ``names``: columns, and "image", the encoded bytes.

    Picklable and thread-safe.
    """

    names: tuple[str, ...]

    def __call__(self, record: TransformInput, rng: np.random.Generator) -> dict[str, Any]:
        return self.values(record)

    def values(self, record: TransformInput) -> dict[str, Any]:
        """Return a record's values by name."""
        return {name: record.image if name == IMAGE else record.columns[name] for name in self.names}
