"""From an image's bytes to RGB pixels, by OpenCV's decoder and within its limits."""

from __future__ import annotations

import threading
from time import perf_counter
from typing import Literal

import numpy as np
import numpy.typing as npt

from ..formats.errors import BadImage
from ..formats.opencv import cv2

Orientation = Literal["ignore", "apply"]
Encoded = bytes | bytearray | memoryview
Pixels = npt.NDArray[np.uint8]


class _Spent(threading.local):
    seconds = 0.0


_spent = _Spent()


def decoding_seconds() -> float:
    """How long this thread has spent decoding so far."""
    return _spent.seconds


def decode_rgb(image: Encoded, *, orientation: Orientation = "ignore", key: str | None = None) -> Pixels:
    """The image's pixels as uint8 [height, width, 3] in RGB, of gray, CMYK and transparent images too.

    The array is new and writable. EXIF orientation is ignored, as ILSVRC12's boxes and most
    published models do, or applied. Thread-safe, and without the GIL while it decodes. Raises
    BadImage, with ``key``, where the bytes do not decode or are more than MAX_PIXELS.
    """
    flags = cv2.IMREAD_COLOR_RGB
    if orientation == "ignore":
        flags |= cv2.IMREAD_IGNORE_ORIENTATION
    began = perf_counter()
    try:
        pixels = cv2.imdecode(np.frombuffer(image, np.uint8), flags)
    except cv2.error as error:
        raise BadImage(f"does not decode: {str(error).strip().splitlines()[-1]}", key=key) from error
    finally:
        _spent.seconds += perf_counter() - began
    if pixels is None:
        raise BadImage("does not decode", key=key)
    return pixels  # type: ignore[return-value]
