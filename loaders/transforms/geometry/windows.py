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
