"""What is measured of one image: brightness, contrast, sharpness, its mean colours and its hashes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from blake3 import blake3

MEAN_SIDE = 32  # pixels of the mean image
FLAT = 2.0  # gray levels: below this contrast, a hash is of noise


class Measures(NamedTuple):
    """The measures of one image, decoded without EXIF's orientation.

    ``brightness`` is the mean gray level, ``contrast`` their standard deviation (both 0 to 255), and
    ``sharpness`` the variance of the Laplacian, all of the image with a shorter side of at most 128 pixels.
    ``hash`` is a perceptual hash of 64 bits, and ``small`` uint8 [32, 32, 3] in RGB."""

    brightness: float
    contrast: float
    sharpness: float
    hash: int
    small: npt.NDArray[np.uint8]

    @property
    def is_flat(self) -> bool:
        """Whether there is too little contrast for the hash to say anything."""
        return self.contrast < FLAT


def digest(image: bytes) -> int:
    """Return the first 8 bytes of the BLAKE3 digest of an image's bytes, as a number."""
    return int.from_bytes(blake3(image).digest(8), "little")
