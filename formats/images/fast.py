"""The fastest decoder of JPEGs that makes the same pixels as OpenCV: simplejpeg, where it is installed."""

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
    """Return simplejpeg's decoder to RGB; None if it is not installed, or makes other pixels than OpenCV.

    It raises ValueError for an image that it refuses, such as a damaged one. Like OpenCV, it ignores EXIF and
    releases the GIL. The canaries are decoded by both, once in a process, in some 5 ms.
    """
    try:
        from simplejpeg import decode_jpeg  # an extra
    except ImportError:
        return None
    decoder: Any = partial(decode_jpeg, colorspace="RGB", fastdct=False, fastupsample=False)
    try:
        images = [(FOLDER / canary.name).read_bytes() for canary in canaries() if canary.reduction == 1]
        return decoder if all(_is_equal(decoder, image) for image in images) else None
    except (OSError, ValueError):  # there are no canaries, or it refuses an image that is right
        return None


def _is_equal(decoder: Decoder, image: bytes) -> bool:
    flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
    return not image.startswith(JPEG_SIGNATURE) or np.array_equal(decoder(image), decode(image, flags))


def decoder_name() -> str:
    """Return the name and version of the decoder of JPEGs."""
    return f"simplejpeg {version('simplejpeg')}" if jpeg_decoder() else f"OpenCV {cv2.__version__}"
