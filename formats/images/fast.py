"""The fastest JPEG decoder that produces the same pixels as OpenCV: simplejpeg, if it is installed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from importlib.metadata import version
from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.formats.images.canaries import FOLDER, canaries
from shardprep.formats.images.decode import Encoded, decode
from shardprep.formats.images.kinds import JPEG_SIGNATURE
from shardprep.formats.images.opencv import cv2

Decoder = Callable[[Encoded], npt.NDArray[np.uint8]]


@cache
def jpeg_decoder() -> Decoder | None:
    """Return simplejpeg's decoder to RGB; None if it is not installed, or decodes a canary unlike OpenCV.

    The decoder raises ValueError for an image it refuses, such as a damaged one. It ignores EXIF and releases
    the GIL. The comparison takes about 5 ms, once per process.
    """
    try:
        from simplejpeg import decode_jpeg  # an extra
    except ImportError:
        return None
    decoder: Any = partial(decode_jpeg, colorspace="RGB", fastdct=False, fastupsample=False)
    flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
    try:
        images = [(FOLDER / canary.name).read_bytes() for canary in canaries() if canary.reduction == 1]
        jpegs = [image for image in images if image.startswith(JPEG_SIGNATURE)]
        is_same = all(np.array_equal(decoder(image), decode(image, flags)) for image in jpegs)
    except (OSError, ValueError):  # there are no canaries, or it refuses an intact image
        return None
    return decoder if is_same else None


def decoder_name() -> str:
    """Return the name and version of the JPEG decoder."""
    return f"simplejpeg {version('simplejpeg')}" if jpeg_decoder() else f"OpenCV {cv2.__version__}"
