"""Images made smaller: decoded, averaged to fewer pixels, and encoded anew with a restart grid. Lossy."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy.typing as npt

from shardprep.formats.errors import BadImage
from shardprep.formats.images.decoder import decode
from shardprep.formats.images.kinds.image_info import ImageInfo
from shardprep.formats.images.kinds.jpeg import marker_segments
from shardprep.formats.images.opencv import cv2

from .grid_table import NotCropReady, grid_interval, with_grid
from .quality import DEFAULT_QUALITY, MAX_GROWTH
from .restart_grid import APP0, APP14, APPLICATION


def shrink(image: bytes, info: ImageInfo, *, shorter_side: int, quality: int = DEFAULT_QUALITY) -> bytes:
    """Return ``image`` as a crop-ready JPEG with ``shorter_side`` pixels on its shorter side.

    ``info`` has its properties; the longer side is rounded. Gray stays gray; other colour spaces become RGB,
    and transparency is left out. EXIF, colour profile and comments of a JPEG are kept. ``quality`` is
    libjpeg's, 1 to 100; chroma has half the resolution. Raises NotCropReady if the image is not larger than
    that, BadImage if it does not decode.
    """
    ratio = shorter_side / min(info.width, info.height)
    if ratio >= 1:
        raise NotCropReady("small enough already")
    flags = cv2.IMREAD_GRAYSCALE if info.components == 1 else cv2.IMREAD_COLOR
    pixels = decode(image, flags | cv2.IMREAD_IGNORE_ORIENTATION)
    size = (max(1, round(info.width * ratio)), max(1, round(info.height * ratio)))
    small = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)
    options = [cv2.IMWRITE_JPEG_QUALITY, quality, cv2.IMWRITE_JPEG_OPTIMIZE, 1]
    interval = grid_interval(_encoded(small, options))
    made = _encoded(small, [*options, cv2.IMWRITE_JPEG_RST_INTERVAL, interval])
    digest = hashlib.sha256(image).digest()
    ready = with_grid(_with_metadata(made, image), digest)
    if len(ready) > len(image) * MAX_GROWTH:
        raise NotCropReady("larger when shrunk")
    return ready


def _encoded(pixels: npt.NDArray[Any], options: list[int]) -> bytes:
    done, data = cv2.imencode(".jpg", pixels, options)
    if not done:
        raise BadImage("OpenCV could not encode it")
    return data.tobytes()


def _with_metadata(made: bytes, original: bytes) -> bytes:
    """Return the new JPEG with the application segments and comments of the original."""
    if not original.startswith(b"\xff\xd8"):
        return made
    kept = [
        original[start - 4 : stop]
        for marker, start, stop in marker_segments(original)
        if marker in APPLICATION - {APP0, APP14}
    ]
    _, _, after = next(marker_segments(made))  # the segment of JFIF
    return b"".join((made[:after], *kept, made[after:]))
