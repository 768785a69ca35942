"""Pixels as a PNG file."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from .opencv import cv2


def png_of(pixels: npt.NDArray[Any]) -> bytes:
    """Return the PNG file of an image: uint8, height x width x 3, in RGB."""
    return bytes(cv2.imencode(".png", pixels[..., ::-1])[1])
