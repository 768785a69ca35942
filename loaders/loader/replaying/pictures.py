"""The pictures in a batch, as RGB pixels to look at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import UsageError
from shardprep.loaders.transforms.columns import IMAGE
from shardprep.loaders.transforms.contract import Transform
from shardprep.loaders.transforms.decode import decode_rgb
from shardprep.loaders.transforms.pixel_format import CHANNELS_FIRST
from shardprep.loaders.transforms.transforms import ImageTransform

Picture = npt.NDArray[np.uint8]


def pictures_of(batch: Sequence[Any], transform: Transform | None) -> list[Picture]:
    """Return the images of a batch: uint8 [height, width, 3] each, in RGB.

    They are in the batch's first part, or in its part "image". Encoded images are decoded. Normalised values
    are made 0..255 again by the ``mean`` and ``std`` of the transform; without these, numbers from 0 to 1 are
    multiplied by 255, and others are stretched from the smallest to the largest. Raises UsageError for a
    batch without images.
    """
    first = batch[0]
    if isinstance(first, dict):
        if IMAGE not in first:
            raise UsageError("the batch has no images, of which a sheet could be made")
        first = first[IMAGE]
    return [_picture(image, transform) for image in first]


def _picture(image: Any, transform: Transform | None) -> Picture:
    if isinstance(image, bytes | memoryview):
        return decode_rgb(image)
    values = np.asarray(image)
    if isinstance(transform, ImageTransform):
        return _plain(_channels_last(values, transform.layout in CHANNELS_FIRST), transform)
    if values.ndim == 2:
        values = np.stack([values] * 3, axis=-1)
    is_first = values.ndim == 3 and values.shape[0] == 3 and values.shape[2] != 3
    values = _channels_last(values, is_first)
    if values.ndim != 3 or values.shape[2] != 3 or values.dtype.kind not in "uif":
        raise UsageError(
            f"the batch has {values.dtype}{list(values.shape)} for each record, which is not an RGB image"
        )
    return _stretched(values)


def _channels_last(values: npt.NDArray[Any], is_first: bool) -> npt.NDArray[Any]:
    return np.moveaxis(values, 0, -1) if is_first else values


def _plain(values: npt.NDArray[Any], transform: ImageTransform) -> Picture:
    """The pixels before they were normalised."""
    if transform.dtype == "uint8":
        return np.ascontiguousarray(values)
    if transform.dtype == "bfloat16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return _rounded(255 * (values.astype(np.float64) * transform.std + transform.mean))


def _stretched(values: npt.NDArray[Any]) -> Picture:
    if values.dtype == np.uint8:
        return np.ascontiguousarray(values)
    values = np.nan_to_num(values.astype(np.float64))
    low, high = values.min(initial=0), values.max(initial=0)
    if low < 0 or high > 1:
        values = (values - low) / max(high - low, 1e-9)
    return _rounded(255 * values)


def _rounded(values: npt.NDArray[np.float64]) -> Picture:
    pixels: Picture = np.rint(values.clip(0, 255)).astype(np.uint8)
    return pixels
