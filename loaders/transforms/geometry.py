"""Geometry of crops and rotations, and smoothing. Pure functions."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import BadImage
from shardprep.formats.images.decode import Encoded, decode
from shardprep.formats.images.header import read_image_header
from shardprep.formats.images.kinds import jpeg_orientation, png_orientation
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
NEAR_STARTS = 16  # the best of so many is on average 1/34 pixel from a pixel, but for some sizes nearly 1/2
NEAR = 16  # parts of a pixel: more starts are searched until one is that near
_REACH = 3  # pixels on each side that cubic interpolation, the widest, reads, and one for rounding


class Window(NamedTuple):
    """Pixels ``start`` to ``stop`` of the side; the first begins where pixel ``at`` of the result begins."""

    start: int
    stop: int
    at: int


@lru_cache(maxsize=256)  # many images have the same size
def window_of(
    side: int,
    resized: int,
    *,
    first: int,
    size: int,
    most: int,
    reduction: int = 1,
    is_whole: bool = False,
    starts: int | None = None,
) -> Window:
    """The source of pixels ``first`` to ``first + size`` of a side of ``side`` pixels resized to ``resized``.

    The window is one of the pixels of the side decoded at 1 / ``reduction`` of its length. It starts where
    one of these and one of the result begin at the same place: resized by the same factor with area
    averaging, it gives the same pixels as the whole side. It becomes at most ``most`` pixels, or 8,192 if
    that is more; where no such place is near enough for that, the nearest to such a place is taken.

    ``is_whole`` asks for the whole side if it becomes no more than that: other interpolations round
    differently beside a cut. Only the ``starts`` nearest places are searched, if that is given, and further
    ones until one is near enough: the pixels then differ a little from those of the whole side, and fewer are
    decoded.
    """
    most = max(most, _STARTS)
    decoded = -(-side // reduction)
    if is_whole and resized <= most:
        return Window(0, decoded, 0)
    resized *= reduction  # so that side / resized is in decoded pixels
    reach = -(-_REACH * resized // side)  # in pixels of the result
    last, least = max(0, first - reach), max(0, first + size + reach - most)
    found = np.arange(last, least - 1, -1, dtype=np.int64)
    beside = found * side % resized
    apart = np.minimum(beside, resized - beside)  # in pixels / resized
    if starts is not None:
        near = np.flatnonzero(apart * NEAR <= resized)[:1]
        apart = apart[: max([starts, *(near + 1).tolist()])]
    at = int(found[np.argmin(apart)])
    stop = -(-(first + size + reach) * side // resized)
    return Window(round(at * side / resized), min(decoded, stop), at)


SMOOTH = -1  # beside OpenCV's numbers of interpolations: smoothed, then bilinear
SMOOTHED = 1.4, 3  # the least and most pixels to one for which it is nearer to antialiasing than averages
_WIDENING = 1.1  # of the filter: at 1.4 to 2 pixels to one, photographs differ least with it
_MOST_WEIGHT = 0.36  # likewise, at 2.5 pixels to one


def smoothed(pixels: Array, across: float, down: float) -> Array:
    """Return an image smoothed for bilinear shrinking, by ``across`` and ``down`` pixels to one.

    Both together have about the variance of a triangle filter of that width, as antialiased bilinear resizing
    has it. OpenCV's kernels for both are vectorized, unlike those that average by area.
    """
    wide, high = _smoothing(across), _smoothing(down)
    return cv2.sepFilter2D(pixels, -1, wide, high, borderType=cv2.BORDER_REPLICATE)


def _smoothing(width: float) -> npt.NDArray[np.float32]:
    beside = min(_MOST_WEIGHT, _WIDENING * max(0.0, width**2 - 1) / 12)
    return np.array([beside, 1 - 2 * beside, beside], np.float32)
