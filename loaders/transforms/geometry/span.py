"""One side of a result: the part of an image's side that it shows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

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
        """Return for each pixel of the result the pixel of the image that its centre lies in: int64 [size].

        A centre between two pixels lies in the latter one.
        """
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
