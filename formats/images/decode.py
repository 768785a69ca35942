"""Decoding of images, guarded against input that crashes the decoder; and encoding as PNG."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import BadImage
from shardprep.formats.images.kinds import PNG_SIGNATURE, without_animation
from shardprep.formats.images.opencv import cv2
from shardprep.formats.images.rare_kinds import is_base_media

Encoded = bytes | bytearray | memoryview

REDUCED_COLOR = {
    1: cv2.IMREAD_COLOR,
    2: cv2.IMREAD_REDUCED_COLOR_2,
    4: cv2.IMREAD_REDUCED_COLOR_4,
    8: cv2.IMREAD_REDUCED_COLOR_8,
}
"""The flag that decodes at 1/n of the size, by n."""


def decode(image: Encoded, flags: int, *, key: str | None = None) -> npt.NDArray[np.uint8]:
    """Decode an image with ``flags`` (``cv2.IMREAD_...``), and return its pixels.

    An animated PNG gives its still image. The array is new and writable. Thread-safe; releases the GIL while
    decoding. Raises BadImage, with ``key``, if the bytes do not decode or give more than MAX_PIXELS, and
    MemoryError if memory is short, which says nothing about the image.
    """
    is_swapped = flags & cv2.IMREAD_COLOR_RGB and is_base_media(image)
    if is_swapped:  # OpenCV 5.0 decodes an AVIF with alpha to BGR even if RGB is requested
        flags = flags & ~cv2.IMREAD_COLOR_RGB | cv2.IMREAD_COLOR
    try:
        if bytes(image[: len(PNG_SIGNATURE)]) == PNG_SIGNATURE:
            image = without_animation(bytes(image))
        pixels: Any = cv2.imdecode(np.frombuffer(image, np.uint8), flags)
        if is_swapped and pixels is not None:
            pixels = cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB)
    except (BadImage, cv2.error) as error:
        if getattr(error, "code", 0) == cv2.Error.StsNoMem:
            raise MemoryError("there is no room for an image's pixels") from error
        raise BadImage(f"does not decode: {str(error).strip().splitlines()[-1]}", key=key) from error
    if pixels is None:
        raise BadImage("does not decode", key=key)
    return pixels  # type: ignore[no-any-return]


def check_decodes(image: bytes) -> None:
    """Decode an image and discard the pixels. Raises BadImage if it does not decode."""
    decode(image, cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)


def crashes_decoder(signal: str) -> str:
    """Return the description of an image that kills its decoding process by this signal."""
    return f"crashes the decoder ({signal})"


def png_of(pixels: npt.NDArray[Any]) -> bytes:
    """Encode RGB pixels, uint8 [height, width, 3], as PNG."""
    return bytes(cv2.imencode(".png", pixels[..., ::-1])[1])
