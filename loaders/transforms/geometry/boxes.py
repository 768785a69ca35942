"""Boxes: rectangles of an image, and what a crop leaves of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import BadTarget

from .span import Places, Span

BEYOND = 0.01  # of a side: annotations are often rounded to whole pixels


class Kept(NamedTuple):
    """The boxes that are left: in pixels of the result, float64 [n, 4], and their ``numbers`` before."""

    boxes: Places
    numbers: npt.NDArray[np.int64]


def boxes_of(value: Any, name: str, *, key: str) -> Places:
    """Return the boxes in the value of a column, cut off at the image: float64 [n, 4], fractions.

    Raises BadTarget, with ``key``, unless it is float32 or float64 [n, 4] of x_min, y_min, x_max and y_max as
    fractions of the image's width and height, in order and at most BEYOND outside of the image.
    """
    if not isinstance(value, np.ndarray) or value.dtype.kind != "f" or value.shape[1:] != (4,):
        form = f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
        raise BadTarget(f"{name} is {form}; boxes are float32 [n, 4]", key=key)
    boxes = value.astype(np.float64)
    if not ((boxes >= -BEYOND) & (boxes <= 1 + BEYOND)).all() or not (boxes[:, :2] <= boxes[:, 2:]).all():
        raise BadTarget(
            f"{name} has a box that is not x_min, y_min, x_max, y_max as fractions of the image, 0 to 1",
            key=key,
        )
    return boxes.clip(0, 1)


def labels_of(value: Any, name: str, boxes: int, *, key: str) -> npt.NDArray[np.int64]:
    """Return the labels of so many boxes: int64 [n]. Raises BadTarget, with ``key``, for other values."""
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu" or value.shape != (boxes,):
        form = f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
        raise BadTarget(f"{name} is {form}; the labels of {boxes} boxes are int32 [{boxes}]", key=key)
    return value.astype(np.int64)


def kept_boxes(boxes: Places, across: Span, down: Span, *, least: float, most: int) -> Kept:
    """Return what the result shows of the boxes (fractions of the image), in their order.

    A box is left out if the result shows none of its area, or less than the share ``least``. Of more than
    ``most`` boxes those that show the largest areas are kept, the earlier of equal ones.
    """
    low_x, low_y, high_x, high_y = (boxes * (across.side, down.side, across.side, down.side)).T
    seen_x, seen_y = _seen(low_x, high_x, across), _seen(low_y, high_y, down)
    whole, seen = (high_x - low_x) * (high_y - low_y), _sizes(seen_x) * _sizes(seen_y)
    numbers = np.flatnonzero((seen > 0) & (seen >= least * whole))
    if len(numbers) > most:
        numbers = np.sort(numbers[np.argsort(-seen[numbers], kind="stable")[:most]])
    (left, right), (top, bottom) = across.moved(*seen_x), down.moved(*seen_y)
    return Kept(np.stack([left, top, right, bottom], axis=1)[numbers], numbers)


def _seen(low: Places, high: Places, span: Span) -> tuple[Places, Places]:
    """The parts of the ranges that the span shows; empty ones may end before they begin."""
    first, last = span.bounds()
    return np.maximum(low, first), np.minimum(high, last)


def _sizes(ranges: tuple[Places, Places]) -> Places:
    low, high = ranges
    return np.maximum(high - low, 0)
