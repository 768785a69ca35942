"""Masks: a class number, or another number, for each pixel of an image."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import BadTarget
from shardprep.formats.images.decoder import decode
from shardprep.formats.images.kinds import png
from shardprep.formats.images.opencv import cv2

from .span import Span

Mask = npt.NDArray[np.uint8]

INSTEAD = "store masks as gray or palette PNG of up to 8 bits, or as arrays uint8[*,*]"


def mask_of(value: Any, name: str, *, key: str) -> Mask:
    """Return the mask in the value of a column: uint8 [height, width].

    An array is taken as it is. Of the bytes of a gray or palette PNG the samples are returned as they are
    stored: numbers of the palette, not its colours, and 0 and 1 of one bit. Raises BadTarget for anything
    else, and BadImage for a PNG that does not decode; both with ``key``.
    """
    if isinstance(value, bytes):
        return _decoded(value, name, key)
    if isinstance(value, np.ndarray) and value.ndim == 2 and value.dtype == np.uint8:
        return value
    form = f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
    raise BadTarget(f"{name} is {form}, which is no mask: {INSTEAD}", key=key)


def resized_mask(mask: Mask, across: Span, down: Span, out: Mask) -> None:
    """Write to ``out`` the pixel of the mask that the centre of each pixel of the result lies in."""
    np.take(mask.take(down.pixels(), axis=0), across.pixels(), axis=1, out=out, mode="clip")


def _decoded(data: bytes, name: str, key: str) -> Mask:
    if not data.startswith(png.SIGNATURE):
        raise BadTarget(f"{name} is an image that is no PNG: {INSTEAD}", key=key)
    samples = png.as_gray(data, key=key)
    if samples is None:
        raise BadTarget(f"{name} is a PNG of colours, not of numbers: {INSTEAD}", key=key)
    gray, bits = samples
    if bits > 8:
        raise BadTarget(f"{name} is a PNG of {bits} bits: {INSTEAD}", key=key)
    pixels = decode(gray, cv2.IMREAD_GRAYSCALE | cv2.IMREAD_IGNORE_ORIENTATION, key=key)
    return (
        pixels if bits == 8 else pixels // np.uint8(255 // ((1 << bits) - 1))
    )  # OpenCV widens them to 0..255
