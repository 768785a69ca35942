"""Making an image crop-ready: its JPEG with a restart grid, checked to decode to the same pixels."""

from __future__ import annotations

import hashlib

import numpy as np

from shardprep.formats.errors import BadImage
from shardprep.formats.images.kinds.image_info import ImageInfo

from .grid_table import NotCropReady, grid_interval, with_grid, without_grid
from .jpegtran import transcode
from .quality import MAX_GROWTH


def crop_ready(image: bytes, info: ImageInfo) -> bytes:
    """Return ``image`` as a JPEG with a restart grid, of the same pixels and metadata.

    ``info`` has its properties. Bytes after the image's end are left out. Raises NotCropReady if it stays as
    it is, BadImage if it does not decode, and OperationError and OSError if jpegtran cannot be run.
    """
    if not image.startswith(b"\xff\xd8") or info.components not in (1, 3):
        raise NotCropReady("not a JPEG of gray or colour")
    interval = grid_interval(image)
    try:
        coded = transcode(without_grid(image), interval=interval)
        made = with_grid(coded, hashlib.sha256(image).digest())
    except BadImage as error:
        raise NotCropReady("damaged, or coded in a way that has no segments") from error
    if len(made) > len(image) * MAX_GROWTH:
        raise NotCropReady("larger with segments")
    if not _same_pixels(image, made):
        raise NotCropReady("of other pixels when coded anew")
    return made


def _same_pixels(image: bytes, made: bytes) -> bool:
    from shardprep.formats.images.decoder import decode  # start-up time: OpenCV
    from shardprep.formats.images.opencv import cv2

    flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
    return np.array_equal(decode(image, flags), decode(made, flags))
