"""Whether an image decodes, and what the decoder mutters about it."""

from __future__ import annotations

import numpy as np

from .errors import BadImage


def check_decodes(image: bytes) -> None:
    """Decode an image and drop the pixels. Raises BadImage where the decoder gives up."""
    from .opencv import cv2  # half of our start-up time, and seldom needed here

    try:
        flags = cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION
        pixels = cv2.imdecode(np.frombuffer(image, np.uint8), flags)
    except cv2.error as error:
        raise BadImage(f"does not decode: {str(error).strip().splitlines()[-1]}") from error
    if pixels is None:
        raise BadImage("does not decode")
