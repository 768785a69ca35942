"""A transform that notes which part of each image is shown."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardprep.loaders.transforms.contract import Array, Transform, TransformInput, fill_rows, outputs_of
from shardprep.loaders.transforms.geometry.shown import ShownPart


class ObservedTransform:
    """A ``transform`` with the same results; ``shown`` maps keys to what it shows, where it can tell.

    It can if it has a method ``shown(record, rng)`` that returns a ShownPart.
    """

    def __init__(self, transform: Transform) -> None:
        self._transform = transform
        self.outputs = outputs_of(transform)
        self.shown: dict[str, ShownPart] = {}

    def __call__(self, record: TransformInput, rng: np.random.Generator) -> Any:
        self._note(record, rng)
        return self._transform(record, rng)

    def fill(self, record: TransformInput, rng: np.random.Generator, *arrays: Array) -> None:
        """Write the outputs."""
        self._note(record, rng)
        fill_rows(self._transform, record, rng, arrays)

    def _note(self, record: TransformInput, rng: np.random.Generator) -> None:
        """Ask what is shown, and put the random numbers back to where they were."""
        tell = getattr(self._transform, "shown", None)
        if tell is None:
            return
        state = rng.bit_generator.state
        found = tell(record, rng)
        rng.bit_generator.state = state
        if isinstance(found, ShownPart):
            self.shown[record.key] = found
