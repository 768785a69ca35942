"""The measuring of an image's pixels, and its thumbnail."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.formats.images.decoder import decode
from shardprep.formats.images.opencv import cv2

from .measures import MEAN_SIDE, Measures

LEAST_SIDE = 128  # a JPEG is decoded at a smaller scale, but not to a shorter side below this
LARGEST_SIDE = 512
THUMBNAIL_SIDE = 104
THUMBNAIL_QUALITY = 72

REDUCED = {
    1: cv2.IMREAD_COLOR,
    2: cv2.IMREAD_REDUCED_COLOR_2,
    4: cv2.IMREAD_REDUCED_COLOR_4,
    8: cv2.IMREAD_REDUCED_COLOR_8,
}


def measured(image: bytes, width: int, height: int) -> Measures:
    """Return the measures of an encoded image with this header. Raises BadImage where it does not decode.

    It is decoded at the smallest scale that JPEG offers with a shorter side of LEAST_SIDE pixels or more, and
    then made smaller, to at most LARGEST_SIDE pixels."""
    scale = max(each for each in REDUCED if each == 1 or min(width, height) >= each * LEAST_SIDE)
    pixels = _bounded(decode(image, REDUCED[scale] | cv2.IMREAD_IGNORE_ORIENTATION))
    gray: npt.NDArray[Any] = cv2.cvtColor(pixels, cv2.COLOR_BGR2GRAY)
    mean, deviation = cv2.meanStdDev(gray)
    laplacian = cv2.meanStdDev(cv2.Laplacian(gray, cv2.CV_32F))[1]
    small: npt.NDArray[Any] = cv2.resize(pixels, (MEAN_SIDE, MEAN_SIDE), interpolation=cv2.INTER_AREA)
    return Measures(
        brightness=float(mean[0, 0]),
        contrast=float(deviation[0, 0]),
        sharpness=float(laplacian[0, 0]) ** 2,
        hash=perceptual_hash(cv2.cvtColor(small, cv2.COLOR_BGR2GRAY)),
        small=np.ascontiguousarray(small[:, :, ::-1]).astype(np.uint8),
    )


def thumbnail(image: bytes) -> bytes:
    """Return a JPEG file of at most THUMBNAIL_SIDE pixels a side, upright. Raises BadImage."""
    small = _bounded(decode(image, cv2.IMREAD_COLOR), THUMBNAIL_SIDE)
    return cv2.imencode(".jpg", small, [cv2.IMWRITE_JPEG_QUALITY, THUMBNAIL_QUALITY])[1].tobytes()


def perceptual_hash(small: npt.NDArray[Any]) -> int:
    """Return a hash of 64 bits that changes little where an image is scaled, or compressed again.

    ``small`` is the image as 32x32 gray pixels. Of its cosine transform, the 64 lowest frequencies but the
    mean are halved into the larger and the smaller ones.
    """
    waves = cv2.dct(small.astype(np.float32))[LOWEST]
    bits = waves >= np.partition(waves, 32)[32]
    return int.from_bytes(np.packbits(bits).tobytes(), "big")


def _lowest(count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the places of the lowest frequencies but the mean, from coarse to fine."""
    places = sorted(
        ((y, x) for y in range(MEAN_SIDE) for x in range(MEAN_SIDE)),
        key=lambda place: (sum(place), place),
    )[1 : count + 1]
    rows, columns = np.array(places).T
    return rows, columns


LOWEST = _lowest(64)


def _bounded(pixels: npt.NDArray[np.uint8], side: int = LARGEST_SIDE) -> npt.NDArray[np.uint8]:
    height, width = pixels.shape[:2]
    if max(height, width) <= side:
        return pixels
    scale = side / max(height, width)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    return cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)  # type: ignore[return-value]
