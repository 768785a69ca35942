"""The pixels of an image's side from which a crop of the resized image is made."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

# OpenCV interpolates in steps of 1/2048 pixel: of so many starts, usually one is that near to a pixel.
_STARTS = 8192
_REACH = 3  # pixels on each side that cubic interpolation, the widest, reads, and one for rounding


class Window(NamedTuple):
    """Pixels ``start`` to ``stop`` of the side; the first begins where pixel ``at`` of the result begins."""

    start: int
    stop: int
    at: int


def window_of(side: int, resized: int, *, first: int, size: int, most: int) -> Window:
    """The source of pixels ``first`` to ``first + size`` of a side of ``side`` pixels resized to ``resized``.

    It is the whole side, unless ``resized`` is more than both ``most`` and 8,192: then it is a part that
    becomes at most the greater of these. The part starts where a pixel of the side and one of the result
    begin at the same place, or as near as possible: resized by the same factor, it gives the same pixels as
    the whole side.
    """
    most = max(most, _STARTS)
    if resized <= most:
        return Window(0, side, 0)
    reach = -(-_REACH * resized // side)  # in pixels of the result
    starts = np.arange(max(0, first - reach), max(0, first + size + reach - most) - 1, -1, dtype=np.int64)
    beside = starts * side % resized
    at = int(starts[np.argmin(np.minimum(beside, resized - beside))])
    stop = -(-(first + size + reach) * side // resized)
    return Window(round(at * side / resized), min(side, stop), at)
