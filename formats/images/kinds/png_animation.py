"""The chunks of an animated PNG (PNG, third edition, 11.3.6), checked as a strict decoder checks them."""

from __future__ import annotations

import struct

from shardprep.formats.errors import BadImage

ANIMATION = frozenset([b"acTL", b"fcTL", b"fdAT"])

_MOST = (1 << 31) - 1  # of any number in a PNG
_SIZES = {b"acTL": 8, b"fcTL": 26}  # an fdAT has a number of 4 bytes, and data
_FRAME = struct.Struct(">IIIIIHHBB")  # number, width, height, x, y, delay (2), disposal, blending


class Animation:
    """The check of an image's animation chunks in their order. Raises BadImage at the first that is wrong.

    It checks each chunk's length, that one acTL comes before all others and before the image, that numbers
    count up from 0, that frames are within the image (a first frame with the image for its data fills it),
    that each frame has data, and that there are as many frames as the acTL says.
    """

    def __init__(self, width: int, height: int) -> None:
        self._size = width, height
        self._frames: int | None = None
        self._seen = 0
        self._number = 0
        self._lacks_data = False

    def see(self, kind: bytes, data: bytes, *, has_image: bool) -> None:
        """Check the next chunk; ``has_image`` is whether an IDAT came before."""
        if len(data) != _SIZES.get(kind, len(data)) or len(data) < 4:
            raise BadImage(f"an animated PNG with {kind.decode()} of {len(data)} bytes")
        if (kind == b"acTL") is not (self._frames is None):
            raise BadImage(f"an animated PNG with {kind.decode()} out of order")
        if kind == b"acTL":
            self._begin(data, has_image)
            return
        if int.from_bytes(data[:4], "big") != self._number:
            raise BadImage("an animated PNG with chunks not numbered in order")
        self._number += 1
        if kind == b"fcTL":
            self._frame(data, has_image)
        elif not has_image or not self._seen or len(data) == 4:
            raise BadImage("an animated PNG with data of no frame, or none")
        else:
            self._lacks_data = False

    def _begin(self, data: bytes, has_image: bool) -> None:
        self._frames, plays = struct.unpack(">II", data)
        if has_image or not 1 <= self._frames <= _MOST or plays > _MOST:
            raise BadImage(
                f"an animated PNG of {self._frames} frames, played {plays} times, or declared late"
            )

    def _frame(self, data: bytes, has_image: bool) -> None:
        _, width, height, x, y, _, _, disposal, blending = _FRAME.unpack(data)
        inside = 0 < width <= self._size[0] - x and 0 < height <= self._size[1] - y
        fills = (width, height, x, y) == (*self._size, 0, 0)
        if not inside or disposal > 2 or blending > 1 or not (has_image or fills):
            raise BadImage("an animated PNG with a frame that does not fit")
        if self._lacks_data or (self._seen and not has_image):
            raise BadImage("an animated PNG with a frame without data")
        self._seen += 1
        self._lacks_data = has_image  # the data of a frame before the image is the image

    def end(self) -> None:
        """Check, at the end of the image, that the animation is complete."""
        if self._lacks_data or self._seen != (self._frames or 0):
            raise BadImage(f"an animated PNG of {self._seen} frames that says it has {self._frames}")
