"""The measuring of an image's pixels, and its thumbnail."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.formats.images.decoder import decode
from shardprep.formats.images.kinds import jpeg
from shardprep.formats.images.opencv import cv2

from .measures import MEAN_SIDE, Measures

SHORTER_SIDE = 128  # pixels of what is measured: contrast and sharpness depend on the scale
NEAR = 0.9  # of a scale: from there on, a change of size blurs more than it makes smaller
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

    The gray levels of a larger one are measured with a shorter side of SHORTER_SIDE pixels."""
    decoded = decode(image, _scale(image, min(width, height)) | cv2.IMREAD_IGNORE_ORIENTATION)
    gray = _smaller(cv2.cvtColor(decoded, cv2.COLOR_BGR2GRAY), SHORTER_SIDE / min(decoded.shape[:2]))
    mean, deviation = cv2.meanStdDev(gray)
    laplacian = cv2.meanStdDev(cv2.Laplacian(gray, cv2.CV_16S))[1]
    small: npt.NDArray[Any] = cv2.resize(decoded, (MEAN_SIDE, MEAN_SIDE), interpolation=cv2.INTER_AREA)
    return Measures(
        brightness=float(mean[0, 0]),
        contrast=float(deviation[0, 0]),
        sharpness=float(laplacian[0, 0]) ** 2,
        hash=perceptual_hash(cv2.cvtColor(small, cv2.COLOR_BGR2GRAY)),
        small=np.ascontiguousarray(small[:, :, ::-1]).astype(np.uint8),
    )


def _scale(image: bytes, side: int) -> int:
    """Return OpenCV's flag for the smallest scale of the JPEG format that leaves SHORTER_SIDE pixels.

    Images of other kinds are decoded as they are: OpenCV would leave pixels out, which makes them sharper.
    """
    enough = [each for each in REDUCED if side >= each * SHORTER_SIDE]
    return REDUCED[max(enough, default=1)] if image.startswith(jpeg.SIGNATURE) else REDUCED[1]


def thumbnail(image: bytes) -> bytes:
    """Return a JPEG file of about THUMBNAIL_SIDE pixels a side, or fewer, upright. Raises BadImage."""
    pixels = decode(image, cv2.IMREAD_COLOR)
    small = _smaller(pixels, THUMBNAIL_SIDE / max(pixels.shape))
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


def _smaller(pixels: npt.NDArray[Any], scale: float) -> npt.NDArray[Any]:
    """Return the pixels at a scale; as they are at one that is near to 1, or above."""
    if scale > NEAR:
        return pixels
    height, width = pixels.shape[:2]
    size = max(1, round(width * scale)), max(1, round(height * scale))
    return cv2.resize(pixels, size, interpolation=cv2.INTER_AREA if scale < 0.5 else cv2.INTER_LINEAR)
