"""A rectangle of an image's pixels."""

from __future__ import annotations

from typing import NamedTuple


class Crop(NamedTuple):
    """A rectangle of whole pixels inside an image."""

    x: int
    y: int
    width: int
    height: int

    def aligned(self, step: int) -> Crop:
        """Return a crop at nearly the same place; its sides begin and end at multiples of ``step``."""
        return Crop(*(side // step * step for side in self))

    def scaled(self, by: int, width: int, height: int) -> Crop:
        """Return the crop ``by`` times as large, cut off at ``width`` and ``height``."""
        x, y = self.x * by, self.y * by
        return Crop(x, y, min(width - x, self.width * by), min(height - y, self.height * by))
