"""The objects of COCO's files, checked: boxes of annotations and sides of images."""

from __future__ import annotations

import math
from typing import Any

MAX_SIDE = 1 << 20  # pixels


def box_in(annotation: dict[str, Any]) -> tuple[float, float, float, float]:
    """Return the left and upper edge, width and height of an annotation in pixels. Raises ValueError."""
    box = annotation.get("bbox")
    if not isinstance(box, list) or len(box) != 4 or not all(type(side) in (int, float) for side in box):
        raise ValueError(f"the annotation {annotation.get('id')} has no bbox of four numbers")
    if not all(math.isfinite(side) and abs(side) <= MAX_SIDE for side in box) or min(box[2:]) < 0:
        raise ValueError(f"the annotation {annotation.get('id')} has the bbox {box}, which is none")
    left, top, width, height = map(float, box)
    return left, top, width, height


def sides_in(image: dict[str, Any]) -> tuple[int, int]:
    """Return the width and height of an image in pixels. Raises ValueError."""
    width, height = image.get("width"), image.get("height")
    if type(width) is not int or type(height) is not int or not 0 < min(width, height) <= MAX_SIDE:
        raise ValueError(f"the image {image.get('id')} has no width and height")
    return width, height
