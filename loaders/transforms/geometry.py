"""Geometry of crops and rotations, and its effect on boxes and masks. Pure functions."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import BadImage, BadTarget
from shardprep.formats.images.decode import Encoded, decode
from shardprep.formats.images.header import read_image_header
from shardprep.formats.images.kinds import PNG_SIGNATURE, as_gray, jpeg_orientation, png_orientation
from shardprep.formats.images.opencv import cv2

Places = npt.NDArray[np.float64]


class Span(NamedTuple):
    """Where one side of a result, of ``size`` pixels, lies on a side of ``side`` pixels of the image.

    ``length`` pixels from ``start`` are resized to ``resized``, and the result begins at the pixel ``first``
    of these: the centre of its pixel i lies at ``start + (first + i + 0.5) * length / resized`` pixels of the
    image. ``is_mirrored`` reverses the result. ``length`` may reach a little beyond the side, as the pixels
    of an image that is decoded at a fraction of its size do.
    """

    side: int
    start: int
    length: int
    resized: int
    size: int
    first: int = 0
    is_mirrored: bool = False

    def pixels(self) -> npt.NDArray[np.int64]:
        """Return the pixel of the image that each pixel's centre lies in, of two the latter: int64 [size]."""
        centres = 2 * (self.first + np.arange(self.size, dtype=np.int64)) + 1  # in halves of a pixel
        found = np.minimum(self.start + centres * self.length // (2 * self.resized), self.side - 1)
        return found[::-1] if self.is_mirrored else found

    def bounds(self) -> tuple[float, float]:
        """Return where the result begins and ends, in pixels of the image."""
        low, high = (self.first * self.length, (self.first + self.size) * self.length)
        return self.start + low / self.resized, min(self.start + high / self.resized, self.side)

    def moved(self, low: Places, high: Places) -> tuple[Places, Places]:
        """Return ranges in pixels of the image as ranges in pixels of the result."""
        low, high = (
            np.clip((at - self.start) * (self.resized / self.length) - self.first, 0, self.size)
            for at in (low, high)
        )
        return (self.size - high, self.size - low) if self.is_mirrored else (low, high)


BEYOND = 0.01  # of a side: annotations are often rounded to whole pixels


class KeptBoxes(NamedTuple):
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
    is_within = ((boxes >= -BEYOND) & (boxes <= 1 + BEYOND)).all(axis=1)
    is_right = is_within & (boxes[:, :2] <= boxes[:, 2:]).all(axis=1)
    if not is_right.all():
        first = ", ".join(f"{side:g}" for side in boxes[is_right.argmin()])
        raise BadTarget(
            f"{name} has the box [{first}]; boxes are x_min, y_min, x_max, y_max as fractions of the image, 0 to 1: "
            "divide pixels by its width and height",
            key=key,
        )
    return boxes.clip(0, 1)


def labels_of(value: Any, name: str, boxes: int, *, key: str) -> npt.NDArray[np.int64]:
    """Return the labels of so many boxes: int64 [n]. Raises BadTarget, with ``key``, for other values."""
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu" or value.shape != (boxes,):
        form = f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
        raise BadTarget(f"{name} is {form}; the labels of {boxes} boxes are int32 [{boxes}]", key=key)
    return value.astype(np.int64)


def kept_boxes(boxes: Places, across: Span, down: Span, *, least: float, most: int) -> KeptBoxes:
    """Return the visible parts of the boxes (fractions of the image), in their order.

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
    return KeptBoxes(np.stack([left, top, right, bottom], axis=1)[numbers], numbers)


def _seen(low: Places, high: Places, span: Span) -> tuple[Places, Places]:
    """The parts of the ranges that the span shows; empty ones may end before they begin."""
    first, last = span.bounds()
    return np.maximum(low, first), np.minimum(high, last)


def _sizes(ranges: tuple[Places, Places]) -> Places:
    low, high = ranges
    return np.maximum(high - low, 0)


Mask = npt.NDArray[np.uint8]

INSTEAD = "store masks as gray or palette PNG of up to 8 bits, or as arrays uint8[*,*]"


def mask_of(value: Any, name: str, *, key: str) -> Mask:
    """Return the mask in the value of a column: uint8 [height, width].

    An array is taken as it is. Of the bytes of a gray or palette PNG the samples are returned as they are
    stored: numbers of the palette, not its colours, and 0 and 1 of one bit. Raises BadTarget for anything
    else, and BadImage for a PNG that does not decode; both with ``key``.
    """
    if isinstance(value, bytes):
        return _decoded(value, name, key)
    if isinstance(value, np.ndarray) and value.ndim == 2 and value.dtype == np.uint8:
        return value
    form = f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
    raise BadTarget(f"{name} is {form}, which is not a mask: {INSTEAD}", key=key)


def resized_mask(mask: Mask, across: Span, down: Span, out: Mask) -> None:
    """Write to ``out`` the pixel of the mask that the centre of each pixel of the result lies in."""
    np.take(mask.take(down.pixels(), axis=0), across.pixels(), axis=1, out=out, mode="clip")


def _decoded(data: bytes, name: str, key: str) -> Mask:
    if not data.startswith(PNG_SIGNATURE):
        raise BadTarget(f"{name} is an image that is not a PNG: {INSTEAD}", key=key)
    samples = as_gray(data, key=key)
    if samples is None:
        raise BadTarget(f"{name} is a colour PNG, not one of numbers: {INSTEAD}", key=key)
    gray, bits = samples
    if bits > 8:
        raise BadTarget(f"{name} is a PNG of {bits} bits: {INSTEAD}", key=key)
    pixels = decode(gray, cv2.IMREAD_GRAYSCALE | cv2.IMREAD_IGNORE_ORIENTATION, key=key)
    return (
        pixels if bits == 8 else pixels // np.uint8(255 // ((1 << bits) - 1))
    )  # OpenCV widens them to 0..255


class ShownPart(NamedTuple):
    """The rectangle of an image that a result shows, in pixels of the image as it is turned before the crop.

    It begins at ``x`` and ``y``, and has a ``width`` and a ``height``. ``is_mirrored`` says that left and
    right have changed places.
    """

    x: float
    y: float
    width: float
    height: float
    is_mirrored: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return a value of JSON types: the crop, and whether it is mirrored."""
        crop = [int(side) if side == int(side) else side for side in self[:4]]
        return {"crop": crop, "mirrored": self.is_mirrored}


Array = npt.NDArray[Any]


class Turn(NamedTuple):
    """A turn of an image: its sides change places if ``swaps``, then each may be reversed."""

    swaps: bool = False
    reverses_x: bool = False
    reverses_y: bool = False

    def pixels(self, stored: Array) -> Array:
        """Return a view of pixels [height, width, …] of the file as they are shown."""
        shown = stored.swapaxes(0, 1) if self.swaps else stored
        return shown[:: -1 if self.reverses_y else 1, :: -1 if self.reverses_x else 1]

    def boxes(self, stored: Array) -> Array:
        """Return boxes [n, 4] (x_min, y_min, x_max, y_max; fractions) of the file as they are shown."""
        shown = stored[:, [1, 0, 3, 2]] if self.swaps else stored.copy()
        for x, reverses in enumerate((self.reverses_x, self.reverses_y)):
            if reverses:
                shown[:, [x, x + 2]] = 1 - shown[:, [x + 2, x]]
        return shown


TURNS = (  # by EXIF's orientation, from 1
    Turn(),
    Turn(reverses_x=True),
    Turn(reverses_x=True, reverses_y=True),
    Turn(reverses_y=True),
    Turn(swaps=True),
    Turn(swaps=True, reverses_x=True),
    Turn(swaps=True, reverses_x=True, reverses_y=True),
    Turn(swaps=True, reverses_y=True),
)


def turn_of(image: Encoded, *, key: str | None = None) -> Turn:
    """Return the turn that decoding applies to an image.

    Of a JPEG it is what EXIF says. An image of another kind, or with a corrupt EXIF block, is decoded with
    and without its turn. Raises BadImage, with ``key``, where these differ by another turn.
    """
    orientation = jpeg_orientation(image)
    if orientation is not None:
        return TURNS[orientation - 1]
    turn = TURNS[_written(bytes(image)) - 1]
    shown = decode(image, cv2.IMREAD_COLOR_RGB, key=key)
    stored = decode(image, cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION, key=key)
    if not np.array_equal(turn.pixels(stored), shown):
        raise BadImage("is rotated, but its header does not say how; use orientation='ignore'", key=key)
    return turn


def _written(image: bytes) -> int:
    """The orientation that the header of an image has, 1 without any."""
    return png_orientation(image) or read_image_header(image).orientation


# OpenCV interpolates in steps of 1/2048 pixel: of so many starts, usually one is that near to a pixel.
_STARTS = 8192
_REACH = 3  # pixels on each side that cubic interpolation, the widest, reads, and one for rounding


class Window(NamedTuple):
    """Pixels ``start`` to ``stop`` of the side; the first begins where pixel ``at`` of the result begins."""

    start: int
    stop: int
    at: int


def window_of(side: int, resized: int, *, first: int, size: int, most: int, is_whole: bool = False) -> Window:
    """The source of pixels ``first`` to ``first + size`` of a side of ``side`` pixels resized to ``resized``.

    The part starts where a pixel of the side and one of the result begin at the same place: resized by the
    same factor with area averaging, it gives the same pixels as the whole side. It becomes at most ``most``
    pixels, or 8,192 if that is more; where no such place is near enough for that, the nearest to such a
    place is taken. ``is_whole`` asks for the whole side if it becomes no more than that: other
    interpolations round differently beside a cut.
    """
    most = max(most, _STARTS)
    if is_whole and resized <= most:
        return Window(0, side, 0)
    reach = -(-_REACH * resized // side)  # in pixels of the result
    last, least = max(0, first - reach), max(0, first + size + reach - most)
    starts = np.arange(last, least - 1, -1, dtype=np.int64)
    beside = starts * side % resized
    at = int(starts[np.argmin(np.minimum(beside, resized - beside))])
    stop = -(-(first + size + reach) * side // resized)
    return Window(round(at * side / resized), min(side, stop), at)
