"""The part of an image that a result shows."""

from __future__ import annotations

from typing import Any, NamedTuple


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
        return {"crop": list(self[:4]), "mirrored": self.is_mirrored}
