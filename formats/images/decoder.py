"""OpenCV's decoder, with checks before it for input that crashes it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import BadImage

from .kinds import avif, png
from .opencv import cv2

Encoded = bytes | bytearray | memoryview


def decode(image: Encoded, flags: int, *, key: str | None = None) -> npt.NDArray[np.uint8]:
    """Return the pixels of an image by ``flags`` (``cv2.IMREAD_...``); of an animated PNG its still image's.

    The array is new and writable. Thread-safe; the GIL is released while it decodes. Raises BadImage, with
    ``key``, if the bytes do not decode or give more than MAX_PIXELS, and MemoryError if there is no memory
    for the pixels, which says nothing about the image.
    """
    try:
        if bytes(image[: len(png.SIGNATURE)]) == png.SIGNATURE:
            image = png.without_animation(bytes(image))
        pixels = _decoded(image, flags)
    except (BadImage, cv2.error) as error:
        if getattr(error, "code", 0) == cv2.Error.StsNoMem:
            raise MemoryError("there is no room for an image's pixels") from error
        raise BadImage(f"does not decode: {str(error).strip().splitlines()[-1]}", key=key) from error
    if pixels is None:
        raise BadImage("does not decode", key=key)
    return pixels


def _decoded(image: Encoded, flags: int) -> npt.NDArray[np.uint8] | None:
    """Decode an image. OpenCV 5.0 leaves an AVIF with alpha in BGR where RGB is asked for."""
    data = np.frombuffer(image, np.uint8)
    if flags & cv2.IMREAD_COLOR_RGB and avif.is_base_media(image):
        pixels = cv2.imdecode(data, flags & ~cv2.IMREAD_COLOR_RGB | cv2.IMREAD_COLOR)
        return None if pixels is None else cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB)  # type: ignore[return-value]
    return cv2.imdecode(data, flags)  # type: ignore[return-value]
