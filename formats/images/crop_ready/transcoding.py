"""What is stored of an image: its bytes, or those of the same picture with segments."""

from __future__ import annotations

from contextlib import suppress

from shardprep.formats.images.header import read_image_header
from shardprep.formats.images.kinds.image_info import ImageFlag, ImageInfo

from .grid_table import NotCropReady, marked
from .making import crop_ready


def stored_image(
    image: bytes, info: ImageInfo, *, segments: bool, shorter_side: int | None, quality: int
) -> tuple[bytes, ImageInfo]:
    """Return the bytes to store of an image with the properties ``info``, and their properties.

    With ``segments`` a JPEG is made crop-ready. An image with more than ``shorter_side`` pixels on its
    shorter side, if that is given, is shrunk to it and encoded at ``quality``. What is crop-ready stays so.
    Raises BadImage if the image is to be changed and does not decode, OperationError, OSError.
    """
    if shorter_side is not None:
        from .shrink import shrink  # start-up time: OpenCV

        with suppress(NotCropReady):
            made = shrink(image, info, shorter_side=shorter_side, quality=quality)
            return made, marked(made, read_image_header(made))
    info = marked(image, info)
    if segments and not info.flags & ImageFlag.CROP_READY:
        with suppress(NotCropReady):
            made = crop_ready(image, info)
            return made, marked(made, read_image_header(made))
    return image, info
