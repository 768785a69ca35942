"""Targets of a transform beside the image: masks and boxes of the same crop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shardprep.formats.errors import BadTarget, UsageError
from shardprep.loaders.transforms.contract import (
    Array,
    ArraySpec,
    TransformInput,
    check_choice,
    is_count,
    is_number,
)
from shardprep.loaders.transforms.geometry import (
    KeptBoxes,
    Span,
    Turn,
    boxes_of,
    kept_boxes,
    labels_of,
    mask_of,
    resized_mask,
)

BoxUnits = Literal["fractions", "pixels"]

BOX_COUNT = "box_count"
NO_LABEL = -1
MOST_BOXES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """The columns of a record that a transform crops, resizes and mirrors as it does the image.

    ``masks`` are columns of a number for each pixel: uint8[*,*], or gray or palette PNGs of up to 8 bits, of
    which the stored numbers are taken and not the palette's colours. A mask has the size of the image. Each
    gives uint8 [height, width]: each pixel is that of the mask at the pixel's centre.

    ``boxes`` is a column float32[*,4] of x_min, y_min, x_max, y_max as fractions of the image, as in
    ``boxes.npy``. It gives float32 [``max_boxes``, 4] of the result, in fractions or, with
    ``box_units="pixels"``, in pixels; then, with ``box_labels``, a column of an integer for each box, int32
    [``max_boxes``]; then ``box_count``, int32. Boxes are cut off at the edges. A box is left
    out if nothing of its area is left, or less than the share ``min_box``. Of more than ``max_boxes`` the
    largest are kept. Order stays; unused rows are zeros, and -1 for labels.

    Masks and boxes belong to the pixels of the file: ``orientation="apply"`` turns them with the image. The
    random numbers are those of the same transform without targets. The call raises BadTarget, with the
    record's key, for a mask of another size and for other values than these.
    """

    masks: Sequence[str] = ()
    boxes: str | None = None
    box_labels: str | None = None
    max_boxes: int = 100
    min_box: float = 0.1
    box_units: BoxUnits = "fractions"

    def _check_targets(self) -> None:
        """Raise UsageError for options that have no meaning."""
        if not isinstance(self.masks, tuple | list) or not all(isinstance(name, str) for name in self.masks):
            raise UsageError(f"masks must be names of columns, such as ('mask',), not {self.masks!r}")
        if not isinstance(self.boxes, str | None) or not isinstance(self.box_labels, str | None):
            raise UsageError(
                f"boxes and box_labels must be names of columns, not {self.boxes!r} and {self.box_labels!r}"
            )
        if self.box_labels is not None and self.boxes is None:
            raise UsageError(f"box_labels={self.box_labels!r} needs boxes, the column of their boxes")
        if not is_count(self.max_boxes, most=MOST_BOXES):
            raise UsageError(f"max_boxes must be 1 to {MOST_BOXES}, not {self.max_boxes!r}")
        if not is_number(self.min_box) or not 0 <= self.min_box <= 1:
            raise UsageError(f"min_box must be a share of a box's area, 0 to 1, not {self.min_box!r}")
        check_choice("box_units", self.box_units, ("fractions", "pixels"))
        names = ["image", *(spec.name for spec in self._target_specs(1, 1))]
        if len(set(names)) != len(names):
            raise UsageError(f"the arrays of a transform must have different names, not {', '.join(names)}")

    def _target_specs(self, height: int, width: int) -> tuple[ArraySpec, ...]:
        """The specs of the arrays that follow an image of this size."""
        found = [ArraySpec(name, (height, width), "uint8") for name in self.masks]
        if self.boxes is not None:
            found.append(ArraySpec(self.boxes, (self.max_boxes, 4), "float32"))
            if self.box_labels is not None:
                found.append(ArraySpec(self.box_labels, (self.max_boxes,), "int32"))
            found.append(ArraySpec(BOX_COUNT, (), "int32"))
        return tuple(found)

    def _write_targets(
        self, record: TransformInput, across: Span, down: Span, arrays: Sequence[Array], *, turn: Turn
    ) -> None:
        """Write the arrays of the specs for a result that shows these parts of the turned image."""
        masks = len(self.masks)
        for name, out in zip(self.masks, arrays[:masks], strict=True):
            mask = turn.pixels(mask_of(_column(record, name), name, key=record.key))
            _check_size(mask, name, across, down, key=record.key)
            resized_mask(mask, across, down, out)
        if self.boxes is not None:
            boxes = turn.boxes(boxes_of(_column(record, self.boxes), self.boxes, key=record.key))
            kept = kept_boxes(boxes, across, down, least=self.min_box, most=self.max_boxes)
            self._write_boxes(record, len(boxes), kept, (across.size, down.size), arrays[masks:])

    def _write_boxes(
        self,
        record: TransformInput,
        boxes: int,
        kept: KeptBoxes,
        size: tuple[int, int],
        arrays: Sequence[Array],
    ) -> None:
        out, *labels, count = arrays
        many = len(kept.numbers)
        out[:many] = kept.boxes if self.box_units == "pixels" else kept.boxes / (*size, *size)
        out[many:] = 0
        count[...] = many
        if self.box_labels is not None:
            given = labels_of(_column(record, self.box_labels), self.box_labels, boxes, key=record.key)
            labels[0][:many], labels[0][many:] = given[kept.numbers], NO_LABEL


def _column(record: TransformInput, name: str) -> Any:
    if name not in record.columns:
        known = ", ".join(record.columns) or "none"
        raise UsageError(f"there is no column {name!r}; the columns that are read: {known}", key=record.key)
    return record.columns[name]


def _check_size(mask: Array, name: str, across: Span, down: Span, *, key: str) -> None:
    if mask.shape != (down.side, across.side):
        height, width = mask.shape
        raise BadTarget(
            f"{name} has {width}x{height} pixels, but the image has {across.side}x{down.side}", key=key
        )
