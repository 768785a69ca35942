"""The form of a decoded image in a batch: its layout, and uint8 or normalised numbers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import UsageError
from shardprep.formats.images.opencv import cv2

Layout = Literal["HWC", "CHW", "NHWC", "NCHW", "channels_last", "channels_first"]
PixelType = Literal["uint8", "float32", "float16", "bfloat16"]

CHANNELS_LAST = ("HWC", "NHWC", "channels_last")
CHANNELS_FIRST = ("CHW", "NCHW", "channels_first")
# NumPy has no bfloat16: a batch has its bits.
STORED = {"uint8": "uint8", "float32": "float32", "float16": "float16", "bfloat16": "uint16"}

IMAGENET_MEAN = (0.485, 0.456, 0.406)  # of R, G, B in 0..1 over the training images
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class PixelFormat:
    """The form to which uint8 RGB [height, width, 3] is converted: (value / 255 - mean) / std unless uint8.

    The float32 values are exact to 1e-6; float16 and bfloat16 are those, rounded to the nearest. float32
    takes four times the memory of uint8 and about 140 µs per image of 224 x 224, the other two half the
    memory and more time: normalising on the training device takes less.
    """

    layout: Layout = "HWC"
    dtype: PixelType = "uint8"
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD

    def __post_init__(self) -> None:
        if self.layout not in CHANNELS_LAST + CHANNELS_FIRST:
            names = " or ".join(", ".join(map(repr, names)) for names in (CHANNELS_LAST, CHANNELS_FIRST))
            raise UsageError(f"layout must be {names}, not {self.layout!r}")
        if self.dtype not in STORED:
            raise UsageError(f"dtype must be one of {', '.join(STORED)}, not {self.dtype!r}")
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise UsageError(f"mean and std must be of three channels, and std positive: {self}")

    @property
    def is_plain(self) -> bool:
        """Whether images keep the form in which they are decoded, so that they can be resized in place."""
        return self._channels_last and self.dtype == "uint8"

    @property
    def stored(self) -> str:
        """The NumPy dtype of an image; that of bfloat16 is uint16, of its bits."""
        return STORED[self.dtype]

    def shape(self, height: int, width: int) -> tuple[int, int, int]:
        """Return the shape of an image of this size."""
        return (height, width, 3) if self._channels_last else (3, height, width)

    def write(self, image: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
        """Write uint8 RGB pixels to ``out``, of this shape and dtype, C-contiguous, or ``image`` itself."""
        if self.dtype in ("uint8", "float32"):
            self._write(image, out)
            return
        exact = np.empty(out.shape, np.float32)
        self._write(image, exact)
        np.copyto(out, exact if self.dtype == "float16" else bfloat16_bits(exact), casting="same_kind")

    def _write(self, image: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
        if not self._channels_last:
            planes = out if self.dtype == "uint8" else np.empty(out.shape, np.uint8)
            cv2.split(image, list(planes))
            image = planes
        if image is not out:
            np.copyto(out, image)
        if self.dtype != "uint8":
            self._normalise(out)

    def _normalise(self, out: npt.NDArray[np.float32]) -> None:
        scale, offset = self._affine
        if self._channels_last:
            # whole rows, because an inner loop over three channels takes five times as long
            out = out.reshape(len(out), -1)
            scale, offset = np.resize(scale, out.shape[1]), np.resize(offset, out.shape[1])
        out *= scale
        out += offset

    @cached_property
    def _channels_last(self) -> bool:
        return self.layout in CHANNELS_LAST

    @cached_property
    def _affine(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        mean, std = np.reshape(self.mean, (3, 1, 1)), np.reshape(self.std, (3, 1, 1))
        return (1 / (255 * std)).astype(np.float32), (-mean / std).astype(np.float32)


def bfloat16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The bits of float32 values as bfloat16, rounded to the nearest, to even in the middle."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
