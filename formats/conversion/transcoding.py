"""What is stored of an image: its bytes, or those of the same picture with segments."""

from __future__ import annotations

from contextlib import suppress

from shardprep.formats.images.crop_ready.grid_table import NotCropReady, marked
from shardprep.formats.images.crop_ready.making import crop_ready
from shardprep.formats.images.header import read_image_header
from shardprep.formats.images.kinds.image_info import ImageFlag, ImageInfo

from .plan import PlanOptions


def stored_image(image: bytes, info: ImageInfo, options: PlanOptions) -> tuple[bytes, ImageInfo]:
    """Return the bytes to store of an image with the properties ``info``, and their properties.

    An image that is crop-ready already stays so. Raises BadImage if the image is to be transcoded and does
    not decode, OperationError, OSError.
    """
    if options.shorter_side is not None:
        from shardprep.formats.images.crop_ready.shrink import shrink  # start-up time: OpenCV

        with suppress(NotCropReady):
            made = shrink(image, info, shorter_side=options.shorter_side, quality=options.quality)
            return made, marked(made, read_image_header(made))
    info = marked(image, info)
    if options.crop_ready and not info.flags & ImageFlag.CROP_READY:
        with suppress(NotCropReady):
            made = crop_ready(image, info)
            return made, marked(made, read_image_header(made))
    return image, info
