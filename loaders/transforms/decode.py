"""Decoding an image's bytes to RGB pixels with OpenCV."""

from __future__ import annotations

import threading
from time import perf_counter
from typing import Literal

import numpy as np
import numpy.typing as npt

from shardprep.formats.images.decoder import Encoded, decode
from shardprep.formats.images.opencv import cv2

Orientation = Literal["ignore", "apply"]
Pixels = npt.NDArray[np.uint8]


class _Spent(threading.local):
    seconds = 0.0


_spent = _Spent()


def decoding_seconds() -> float:
    """Seconds that this thread has spent decoding so far."""
    return _spent.seconds


def decode_rgb(image: Encoded, *, orientation: Orientation = "ignore", key: str | None = None) -> Pixels:
    """Decode ``image`` to uint8 [height, width, 3] in RGB, also from gray, CMYK and transparent images.

    ``image`` is the encoded bytes; of an animated PNG its still image is decoded. The array is new and
    writable. EXIF ``orientation`` is ignored, as for ILSVRC12's boxes and most published models, or applied
    ("apply"). Thread-safe; the GIL is released while decoding. Raises BadImage, with the record's ``key``,
    where the bytes do not decode, have more than MAX_PIXELS pixels, or are an animated PNG that breaks the
    rules of animation.

    An image that crashes OpenCV ends the process: a :class:`.Loader` with workers survives that and names the
    record, one without (``workers=0``) does not.
    """
    flags = cv2.IMREAD_COLOR_RGB
    if orientation == "ignore":
        flags |= cv2.IMREAD_IGNORE_ORIENTATION
    began = perf_counter()
    try:
        return decode(image, flags, key=key)
    finally:
        _spent.seconds += perf_counter() - began
