"""The part of an image that a result shows."""

from __future__ import annotations

from typing import Any, NamedTuple


class ShownPart(NamedTuple):
    """The rectangle of an image that a result shows, in pixels of the image, and whether it is mirrored.

    It begins at ``x`` and ``y``, of the image as it is turned before the crop.
    """

    x: float
    y: float
    width: float
    height: float
    is_mirrored: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return a value of JSON types: the crop, and whether it is mirrored."""
        return {"crop": list(self[:4]), "mirrored": self.is_mirrored}
