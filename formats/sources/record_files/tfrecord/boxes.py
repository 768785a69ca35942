"""The boxes of a record, in the features of the official scripts."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from shardprep.formats.records.labels import UNLABELLED

from .dialect import BOX_LABEL, BOX_SIDES
from .example import Feature, bounded, float_values, integer_values, there
from .wire import MAX_VARINT, ByteWindow

MAX_BOXES = 10_000  # of one image
SIDES = ("x_min", "y_min", "x_max", "y_max")
BOX = np.dtype([("row", "<i8"), ("label", "<i8"), *((side, "<f8") for side in SIDES)])

_MOST_BYTES = MAX_BOXES * MAX_VARINT


def boxes_of(
    window: ByteWindow, found: Mapping[str, Feature], first_label: int
) -> list[tuple[int, float, float, float, float]]:
    """Return label and sides of each box, within the image; the file may have sides swapped.

    Raises ValueError for other numbers of sides than of boxes, and for sides that are no numbers.
    """
    sides = [float_values(window, bounded(there(found, name), _MOST_BYTES)) for name in BOX_SIDES]
    labels = np.full(len(sides[0]), UNLABELLED, np.int64)
    if BOX_LABEL in found:
        labels = integer_values(window, bounded(found[BOX_LABEL], _MOST_BYTES)) - first_label
    if {len(side) for side in sides} != {len(labels)} or not np.isfinite(sides).all():
        raise ValueError("its boxes do not have one finite number for each side")
    xs, ys = np.sort(sides[0::2], axis=0).clip(0, 1), np.sort(sides[1::2], axis=0).clip(0, 1)
    columns = (labels, xs[0], ys[0], xs[1], ys[1])
    return list(zip(*(column.tolist() for column in columns), strict=True))
