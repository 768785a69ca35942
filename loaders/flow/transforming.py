"""A loader's transforms, over the items of a flow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...formats.errors import UsageError
from ...formats.record import Record
from ..transforms import ArraySpec, Transform, outputs_of

LABEL = ArraySpec("label", (), "int64")


@dataclass(frozen=True)
class Transforming:
    """Makes (what the transform returns, label) of (encoded image, label). Picklable if the transform is.

    The transform sees a record without a key: an error's note names the item.
    """

    transform: Transform

    @property
    def outputs(self) -> tuple[ArraySpec, ...] | None:
        """The arrays of an item, where the transform declares its own."""
        declared = outputs_of(self.transform)
        return None if declared is None else (*declared, LABEL)

    def __call__(self, item: Any, rng: np.random.Generator) -> tuple[Any, ...]:
        if not (isinstance(item, tuple | list) and len(item) == 2):
            raise UsageError(
                f"a transform is for items of (image, label), and not for a {type(item).__name__}"
            )
        image, label = item
        made = self.transform(Record("", int(label), image), rng)
        return (*(made if isinstance(made, tuple) else (made,)), np.int64(label))
