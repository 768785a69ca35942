"""EXIF orientation: how the pixels of a file are turned before they are shown."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import BadImage
from shardprep.formats.images.decoder import Encoded, decode
from shardprep.formats.images.header import read_image_header
from shardprep.formats.images.kinds.jpeg import jpeg_orientation
from shardprep.formats.images.kinds.png import png_orientation
from shardprep.formats.images.opencv import cv2

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
        raise BadImage("is turned, and its header does not say how; use orientation='ignore'", key=key)
    return turn


def _written(image: bytes) -> int:
    """The orientation that the header of an image has, 1 without any."""
    return png_orientation(image) or read_image_header(image).orientation
