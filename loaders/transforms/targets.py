"""Masks and boxes, cropped like the image of a transform."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import BadTarget, UsageError
from shardprep.formats.images.decode import cv2, decode
from shardprep.formats.images.header import PNG_SIGNATURE, as_gray
from shardprep.formats.runtime.progress import check_int, is_number
from shardprep.loaders.transforms.contract import Array, ArraySpec, TransformInput, check_choice
from shardprep.loaders.transforms.geometry import Places, Span, Turn

BoxUnits = Literal["fractions", "pixels"]

BOX_COUNT = "box_count"
NO_LABEL = -1
MAX_BOXES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """The columns of a record that a transform crops, resizes and mirrors like the image.

    ``masks`` are columns with a number for each pixel: uint8[*,*], or gray or palette PNGs of up to 8 bits,
    whose stored numbers are taken, not the palette's colours. A mask has the size of the image. Each gives
    uint8 [height, width], sampled at the centres of the pixels.

    ``boxes`` is a column float32[*,4] of x_min, y_min, x_max, y_max as fractions of the image, as in
    ``boxes.npy``. It gives float32 [``max_boxes``, 4] as fractions of the result, or, with
    ``box_units="pixels"``, in its pixels; then, with ``box_labels``, a column of one integer per box, int32
    [``max_boxes``]; then ``box_count``, int32. Boxes are clipped at the edges, and left out if no area
    remains, or less than the share ``min_box``. Of more than ``max_boxes`` the largest are kept. The order
    stays; unused rows are 0, and -1 for labels.

    Masks and boxes belong to the file's pixels: ``orientation="apply"`` turns them with the image. Targets
    do not change the random numbers. The call raises BadTarget, with the record's key, for masks of another
    size, and for other values than these.
    """

    masks: Sequence[str] = ()
    boxes: str | None = None
    box_labels: str | None = None
    max_boxes: int = 100
    min_box: float = 0.1
    box_units: BoxUnits = "fractions"

    def _check_targets(self) -> None:
        if not isinstance(self.masks, tuple | list) or not all(isinstance(name, str) for name in self.masks):
            raise UsageError(f"masks must be names of columns, such as ('mask',), not {self.masks!r}")
        if not isinstance(self.boxes, str | None) or not isinstance(self.box_labels, str | None):
            raise UsageError(
                f"boxes and box_labels must be names of columns, not {self.boxes!r} and {self.box_labels!r}"
            )
        if self.box_labels is not None and self.boxes is None:
            raise UsageError(f"box_labels={self.box_labels!r} needs boxes, the column of their boxes")
        check_int(self.max_boxes, "max_boxes", least=1, most=MAX_BOXES)
        if not is_number(self.min_box) or not 0 <= self.min_box <= 1:
            raise UsageError(f"min_box must be a share of a box's area, 0 to 1, not {self.min_box!r}")
        check_choice("box_units", self.box_units, ("fractions", "pixels"))
        names = ["image", *(spec.name for spec in self._target_specs(1, 1))]
        if len(set(names)) != len(names):
            raise UsageError(f"the arrays of a transform must have different names, not {', '.join(names)}")

    def _target_specs(self, height: int, width: int) -> tuple[ArraySpec, ...]:
        specs = [ArraySpec(name, (height, width), "uint8") for name in self.masks]
        if self.boxes is not None:
            specs.append(ArraySpec(self.boxes, (self.max_boxes, 4), "float32"))
            if self.box_labels is not None:
                specs.append(ArraySpec(self.box_labels, (self.max_boxes,), "int32"))
            specs.append(ArraySpec(BOX_COUNT, (), "int32"))
        return tuple(specs)

    def _write_targets(
        self, record: TransformInput, across: Span, down: Span, arrays: Sequence[Array], *, turn: Turn
    ) -> None:
        """Write the arrays of the specs for a result at this place of the turned image."""
        masks = len(self.masks)
        for name, out in zip(self.masks, arrays[:masks], strict=True):
            mask = turn.apply_to_pixels(parse_mask(_read_column(record, name), name, key=record.key))
            if mask.shape != (down.side, across.side):
                height, width = mask.shape
                raise BadTarget(
                    f"{name} has {width}x{height} pixels, but the image has {across.side}x{down.side}",
                    key=record.key,
                )
            np.take(mask.take(down.pixels(), axis=0), across.pixels(), axis=1, out=out, mode="clip")
        if self.boxes is None:
            return
        boxes = turn.apply_to_boxes(parse_boxes(_read_column(record, self.boxes), self.boxes, key=record.key))
        visible, numbers = visible_boxes(boxes, across, down, least=self.min_box, most=self.max_boxes)
        size, many = (across.size, down.size), len(numbers)
        out, *labels, count = arrays[masks:]
        out[:many] = visible if self.box_units == "pixels" else visible / (*size, *size)
        out[many:] = 0
        count[...] = many
        if (column := self.box_labels) is not None:
            values = parse_labels(_read_column(record, column), column, len(boxes), key=record.key)
            labels[0][:many], labels[0][many:] = values[numbers], NO_LABEL


def _read_column(record: TransformInput, name: str) -> Any:
    if name not in record.columns:
        names = ", ".join(record.columns) or "none"
        raise UsageError(f"there is no column {name!r}; the columns that are read: {names}", key=record.key)
    return record.columns[name]


def _form(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__


BOX_TOLERANCE = 0.01  # of a side: annotations are often rounded to whole pixels


def parse_boxes(value: Any, name: str, *, key: str) -> Places:
    """Return the boxes of a column, clipped to the image: float64 [n, 4], fractions. Raises BadTarget."""
    if not isinstance(value, np.ndarray) or value.dtype.kind != "f" or value.shape[1:] != (4,):
        raise BadTarget(f"{name} is {_form(value)}; boxes are float32 [n, 4]", key=key)
    boxes = value.astype(np.float64)
    is_within = ((boxes >= -BOX_TOLERANCE) & (boxes <= 1 + BOX_TOLERANCE)).all(axis=1)
    is_valid = is_within & (boxes[:, :2] <= boxes[:, 2:]).all(axis=1)
    if not is_valid.all():
        first = ", ".join(f"{side:g}" for side in boxes[is_valid.argmin()])
        raise BadTarget(
            f"{name} has the box [{first}]; boxes are x_min, y_min, x_max, y_max as fractions of the image, 0 to 1: "
            "divide pixels by its width and height",
            key=key,
        )
    return boxes.clip(0, 1)


def parse_labels(value: Any, name: str, boxes: int, *, key: str) -> npt.NDArray[np.int32]:
    """Return the labels of this number of boxes: int32 [n]. Raises BadTarget for other values."""
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu" or value.shape != (boxes,):
        raise BadTarget(f"{name} is {_form(value)}; the labels of {boxes} boxes are int32 [{boxes}]", key=key)
    labels = value.astype(np.int32)
    if not np.array_equal(labels, value):
        raise BadTarget(f"{name} has {value[labels != value][0]}, which does not fit into int32", key=key)
    return labels


def visible_boxes(
    boxes: Places, across: Span, down: Span, *, least: float, most: int
) -> tuple[Places, npt.NDArray[np.int64]]:
    """Return the visible parts of boxes (fractions of the image), in pixels of the result, and their numbers.

    A box is left out if the result shows none of its area, or less than the share ``least``. Of more than
    ``most`` boxes those with the largest visible areas are kept, the earlier of equal ones.
    """
    low_x, low_y, high_x, high_y = (boxes * (across.side, down.side, across.side, down.side)).T
    seen_x, seen_y = _visible_ranges(low_x, high_x, across), _visible_ranges(low_y, high_y, down)
    wide, high = (np.maximum(last - first, 0) for first, last in (seen_x, seen_y))
    area, visible = (high_x - low_x) * (high_y - low_y), wide * high
    numbers = np.flatnonzero((visible > 0) & (visible >= least * area))
    if len(numbers) > most:
        numbers = np.sort(numbers[np.argsort(-visible[numbers], kind="stable")[:most]])
    (left, right), (top, bottom) = across.to_result(*seen_x), down.to_result(*seen_y)
    return np.stack([left, top, right, bottom], axis=1)[numbers], numbers


def _visible_ranges(low: Places, high: Places, span: Span) -> tuple[Places, Places]:
    """Return the parts of the ranges that the span shows; empty ones may end before they begin."""
    first, last = span.bounds()
    return np.maximum(low, first), np.minimum(high, last)


Mask = npt.NDArray[np.uint8]

MASK_ADVICE = "store masks as gray or palette PNG of up to 8 bits, or as arrays uint8[*,*]"


def parse_mask(value: Any, name: str, *, key: str) -> Mask:
    """Return a mask of a column, uint8 [height, width]: an array, or the stored samples of a PNG.

    Samples are palette indices, not colours, and 0 and 1 for one bit. Raises BadTarget for other values, and
    BadImage for a PNG that does not decode, both with ``key``.
    """
    if isinstance(value, np.ndarray) and value.ndim == 2 and value.dtype == np.uint8:
        return value
    is_png = isinstance(value, bytes) and value.startswith(PNG_SIGNATURE)
    samples = as_gray(value, key=key) if is_png else None
    if samples is None or samples[1] > 8:
        raise BadTarget(f"{name} is {_form(value)}, which is not a mask: {MASK_ADVICE}", key=key)
    gray, bits = samples
    pixels = decode(gray, cv2.IMREAD_GRAYSCALE | cv2.IMREAD_IGNORE_ORIENTATION, key=key)
    # OpenCV widens fewer bits to 0..255.
    return pixels if bits == 8 else pixels // np.uint8(255 // ((1 << bits) - 1))
