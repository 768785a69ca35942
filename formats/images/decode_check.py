"""The check that an image decodes."""

from __future__ import annotations


def check_decodes(image: bytes) -> None:
    """Decode an image and discard the pixels. Raises BadImage if it does not decode."""
    from .decoder import decode  # start-up time: OpenCV
    from .opencv import cv2

    decode(image, cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)


def crashes_decoder(signal: str) -> str:
    """Return the problem of an image if decoding it alone ended the process by this signal."""
    return f"crashes the decoder ({signal})"
