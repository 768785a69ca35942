"""The decoding of images, guarded against input that crashes the decoder, and pixels as a PNG file."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import BadImage
from shardprep.formats.images.kinds import PNG_SIGNATURE, without_animation
from shardprep.formats.images.opencv import cv2
from shardprep.formats.images.rare_kinds import is_base_media

Encoded = bytes | bytearray | memoryview


def decode(image: Encoded, flags: int, *, key: str | None = None) -> npt.NDArray[np.uint8]:
    """Return the pixels of an image by ``flags`` (``cv2.IMREAD_...``); of an animated PNG its still image's.

    The array is new and writable. Thread-safe; the GIL is released while it decodes. Raises BadImage, with
    ``key``, if the bytes do not decode or give more than MAX_PIXELS, and MemoryError if there is no memory
    for the pixels, which says nothing about the image.
    """
    try:
        if bytes(image[: len(PNG_SIGNATURE)]) == PNG_SIGNATURE:
            image = without_animation(bytes(image))
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
    if flags & cv2.IMREAD_COLOR_RGB and is_base_media(image):
        pixels = cv2.imdecode(data, flags & ~cv2.IMREAD_COLOR_RGB | cv2.IMREAD_COLOR)
        return None if pixels is None else cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB)  # type: ignore[return-value]
    return cv2.imdecode(data, flags)  # type: ignore[return-value]


def check_decodes(image: bytes) -> None:
    """Decode an image and discard the pixels. Raises BadImage if it does not decode."""
    decode(image, cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)


def crashes_decoder(signal: str) -> str:
    """Return the problem of an image if decoding it alone ended the process by this signal."""
    return f"crashes the decoder ({signal})"


def png_of(pixels: npt.NDArray[Any]) -> bytes:
    """Return the PNG file of an image: uint8, height x width x 3, in RGB."""
    return bytes(cv2.imencode(".png", pixels[..., ::-1])[1])
