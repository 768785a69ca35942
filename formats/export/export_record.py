"""A record as a format gets it: with its name there, its properties, its boxes and its columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from shardprep.formats.containers.table import Rows
from shardprep.formats.images.kinds.image_info import KINDS

_FLAGS = {name: int(flag) for name, flag in KINDS.items()}  # members of an enum are slow to combine
SIDES = ("x_min", "y_min", "x_max", "y_max")


class ExportRecord(NamedTuple):
    """One record; ``name`` is the format's own, and ``row`` that of the index.

    ``boxes`` are its rows of the table of boxes, None where the dataset has none; ``columns`` the decoded
    values by name. Without images, ``image`` is empty.
    """

    name: str
    key: str
    label: int
    image: bytes
    row: np.void
    boxes: Rows | None
    columns: Mapping[str, Any]

    @property
    def kind(self) -> str:
        """The name of the kind of the image, such as JPEG."""
        return kind_of(int(self.row["flags"]))


def kind_of(flags: int) -> str:
    """Return the name of the kind that the column ``flags`` of the index tells."""
    return next((name for name, flag in _FLAGS.items() if flag & flags), "JPEG")


def corners(boxes: Rows) -> list[list[float]]:
    """Return x_min, y_min, x_max, y_max of each box, as fractions of the image's width and height."""
    return [[float(box[side]) for side in SIDES] for box in boxes]
