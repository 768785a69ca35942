"""Whether an image decodes, and what the decoder mutters about it."""

from __future__ import annotations

import os

import numpy as np

from .errors import BadImage
from .image_header import MAX_PIXELS

# OpenCV reads its limit once, when it is imported; our own check of the header comes before it.
os.environ.setdefault("OPENCV_IO_MAX_IMAGE_PIXELS", str(MAX_PIXELS))


def check_decodes(image: bytes) -> None:
    """Decode an image and drop the pixels. Raises BadImage where the decoder gives up."""
    import cv2

    try:
        flags = cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION
        pixels = cv2.imdecode(np.frombuffer(image, np.uint8), flags)
    except cv2.error as error:
        raise BadImage(f"does not decode: {str(error).strip().splitlines()[-1]}") from error
    if pixels is None:
        raise BadImage("does not decode")
