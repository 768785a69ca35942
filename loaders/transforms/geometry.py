"""Geometry of crops and rotations, and smoothing: pure functions."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import BadImage
from shardprep.formats.images.decode import Encoded, cv2, decode
from shardprep.formats.images.header import (
    WEBP_SIGNATURE,
    jpeg_orientation,
    png_orientation,
    read_image_header,
)
from shardprep.loaders.transforms.contract import Array

Places = npt.NDArray[np.float64]


class Span(NamedTuple):
    """The place of one side of a result, of ``size`` pixels, on the image's side of ``side`` pixels.

    ``length`` pixels from ``start`` are resized to ``resized``, of which the result begins at pixel
    ``first``: the centre of its pixel i lies at ``start + (first + i + 0.5) * length / resized`` pixels of
    the image. ``is_mirrored`` reverses the result. ``length`` may reach a little beyond the side, as pixels
    decoded at a fraction of the size do.
    """

    side: int
    start: int
    length: int
    resized: int
    size: int
    first: int = 0
    is_mirrored: bool = False

    def pixels(self) -> npt.NDArray[np.int64]:
        """Return the image's pixel at the centre of each pixel, between two the later one: int64 [size]."""
        centres = 2 * (self.first + np.arange(self.size, dtype=np.int64)) + 1  # in half pixels
        pixels = np.minimum(self.start + centres * self.length // (2 * self.resized), self.side - 1)
        return pixels[::-1] if self.is_mirrored else pixels

    def bounds(self) -> tuple[float, float]:
        """Return the beginning and end of the result, in pixels of the image."""
        low, high = (self.first * self.length, (self.first + self.size) * self.length)
        return self.start + low / self.resized, min(self.start + high / self.resized, self.side)

    def to_result(self, low: Places, high: Places) -> tuple[Places, Places]:
        """Convert ranges from pixels of the image to pixels of the result."""
        low, high = (
            np.clip((at - self.start) * (self.resized / self.length) - self.first, 0, self.size)
            for at in (low, high)
        )
        return (self.size - high, self.size - low) if self.is_mirrored else (low, high)


class ShownPart(NamedTuple):
    """The rectangle of an image that a result shows, in pixels of the image as oriented before the crop.

    It begins at ``x`` and ``y`` and has ``width`` and ``height``. ``is_mirrored`` swaps left and right.
    """

    x: float
    y: float
    width: float
    height: float
    is_mirrored: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return a value of JSON types; whole numbers are ints."""
        crop = [int(side) if side == int(side) else side for side in self[:4]]
        return {"crop": crop, "mirrored": self.is_mirrored}


class Turn(NamedTuple):
    """An EXIF rotation or reflection: x and y are swapped if ``swaps``, then each may be reversed."""

    swaps: bool = False
    reverses_x: bool = False
    reverses_y: bool = False

    def apply_to_pixels(self, stored: Array) -> Array:
        """Apply the turn to pixels [height, width, …]; return a view."""
        shown = stored.swapaxes(0, 1) if self.swaps else stored
        return shown[:: -1 if self.reverses_y else 1, :: -1 if self.reverses_x else 1]

    def apply_to_boxes(self, stored: Array) -> Array:
        """Apply the turn to boxes [n, 4] of fractions x_min, y_min, x_max, y_max; return new ones."""
        shown = stored[:, [1, 0, 3, 2]] if self.swaps else stored.copy()
        for x, reverses in enumerate((self.reverses_x, self.reverses_y)):
            if reverses:
                shown[:, [x, x + 2]] = 1 - shown[:, [x + 2, x]]
        return shown


TURNS = (  # by EXIF orientation, from 1
    Turn(),
    Turn(reverses_x=True),
    Turn(reverses_x=True, reverses_y=True),
    Turn(reverses_y=True),
    Turn(swaps=True),
    Turn(swaps=True, reverses_x=True),
    Turn(swaps=True, reverses_x=True, reverses_y=True),
    Turn(swaps=True, reverses_y=True),
)


def find_turn(image: Encoded, *, key: str | None = None) -> Turn:
    """Return the turn that decoding applies to an image.

    A JPEG's is in its EXIF block. For other formats, or a corrupt EXIF block, the header's turn is checked by
    decoding the image with and without it. Raises BadImage, with ``key``, if it is another one.
    """
    orientation = jpeg_orientation(image)
    if orientation is not None:
        return TURNS[orientation - 1]
    encoded = bytes(image)
    is_webp = encoded.startswith(WEBP_SIGNATURE)
    turn = TURNS[(png_orientation(encoded) or (read_image_header(encoded).orientation if is_webp else 1)) - 1]
    shown = decode(image, cv2.IMREAD_COLOR_RGB, key=key)
    stored = decode(image, cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION, key=key)
    if not np.array_equal(turn.apply_to_pixels(stored), shown):
        raise BadImage("is rotated, but its header does not say how; use orientation='ignore'", key=key)
    return turn


# OpenCV interpolates in steps of 1/2048 pixel: among 8192 starts, one is usually that near to a pixel.
_STARTS = 8192
INVISIBLE_SHIFT = 1 / 32  # pixels between starts that photographs do not show
_REACH = 3  # pixels that cubic interpolation, the widest, reads on each side, and one for rounding


class Window(NamedTuple):
    """Pixels ``start`` to ``stop`` of a side; the result's pixel ``at`` begins at ``start + shift``.

    ``shift`` is at most half a pixel, and may be negative.
    """

    start: int
    stop: int
    at: int
    shift: float = 0.0


@lru_cache(maxsize=256)  # many images have the same size
def resize_window(
    side: int,
    resized: int,
    *,
    first: int,
    size: int,
    most: int,
    reduction: int = 1,
    is_whole: bool = False,
    slack: float = 0.0,
) -> Window:
    """Return the source of ``size`` pixels from ``first`` when ``side`` pixels are resized to ``resized``.

    The window is in pixels of the side decoded at 1 / ``reduction``. It starts at the nearest place where one
    of these pixels and one of the result begin within ``slack`` pixels of each other; if none is in reach,
    where they are closest. If they begin together, area averaging by the same factor gives the same pixels as
    of the whole side. It becomes at most ``most`` pixels, or 8,192 if that is more.

    ``is_whole`` asks for the whole side if it becomes no more than that: other interpolations round
    differently beside a cut.
    """
    most = max(most, _STARTS)
    decoded = -(-side // reduction)
    if is_whole and resized <= most:
        return Window(0, decoded, 0)
    resized *= reduction  # side / resized is then in decoded pixels
    reach = -(-_REACH * resized // side)  # in pixels of the result
    last, least = max(0, first - reach), max(0, first + size + reach - most)
    candidates = np.arange(last, least - 1, -1, dtype=np.int64)
    beside = candidates * side % resized
    apart = np.minimum(beside, resized - beside)  # in pixels / resized
    near = np.flatnonzero(apart <= slack * resized)
    at = int(candidates[near[0] if len(near) else np.argmin(apart)])
    start, stop = round(at * side / resized), -(-(first + size + reach) * side // resized)
    return Window(start, min(decoded, stop), at, at * side / resized - start)


SMOOTH = -1  # beside OpenCV's interpolations: smoothed, then bilinear
SMOOTH_RANGE = 1.2, 3  # the range of pixels to one in which it is faster than area averages, and seldom worse
_WIDENING = 1.1  # of the filter: photographs then differ least at 1.4 to 2 pixels to one
_MAX_WEIGHT = 0.36  # likewise, at 2.5 pixels to one


def smooth(pixels: Array, across: float, down: float, shift: float) -> Array:
    """Smooth an image before it shrinks bilinearly by ``across`` and ``down`` pixels to one.

    Both steps together have about the variance of a triangle filter of that width, the filter of antialiased
    bilinear resizing. The image also moves left by ``shift`` pixels, at most half a pixel: a shift across
    takes no time, while OpenCV filters columns several times slower with a kernel that is not symmetric.
    """
    wide, high = (min(_MAX_WEIGHT, _WIDENING * max(0.0, width**2 - 1) / 12) for width in (across, down))
    row = np.array([wide + (shift**2 - shift) / 2, 1 - 2 * wide - shift**2, wide + (shift**2 + shift) / 2])
    column = np.array([high, 1 - 2 * high, high])
    return cv2.sepFilter2D(pixels, -1, row, column, borderType=cv2.BORDER_REPLICATE)
