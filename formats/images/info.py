"""Properties of image files, limits for all kinds, and the causes of bad images."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag

MAX_PIXELS = 1 << 26  # 64 Mpx decode to 200 MB; ILSVRC12's largest image has 40 Mpx
EXTREME_ASPECT = 16  # longer to shorter side; resizing a longer image could exhaust the memory
CONVERT_IT = ": convert it to PNG or JPEG"


class ImageFlag(IntFlag):
    """The kind and unusual properties of an image, stored in the index column ``flags``.

    An image without a flag of :data:`KINDS` is a JPEG. ``SEVERAL`` marks a TIFF of several pages, or an
    animated WebP, GIF or AVIF: the first page or frame is decoded. ``CROP_READY`` marks a JPEG with a table
    of its segments.
    """

    PNG = 1
    PROGRESSIVE = 2
    ADOBE = 4
    TRAILING_BYTES = 8
    CORRUPT_EXIF = 16
    WEBP = 32
    TIFF = 64
    BMP = 128
    GIF = 256
    JPEG_2000 = 512
    NETPBM = 1024
    AVIF = 2048
    SUN_RASTER = 4096
    SEVERAL = 8192
    CROP_READY = 32768


KINDS = {
    "JPEG": ImageFlag(0),
    "PNG": ImageFlag.PNG,
    "WebP": ImageFlag.WEBP,
    "TIFF": ImageFlag.TIFF,
    "BMP": ImageFlag.BMP,
    "GIF": ImageFlag.GIF,
    "JPEG 2000": ImageFlag.JPEG_2000,
    "Netpbm": ImageFlag.NETPBM,
    "AVIF": ImageFlag.AVIF,
    "Sun raster": ImageFlag.SUN_RASTER,
}
"""The flag of each kind, by its name."""
_FLAGS = {name: int(flag) for name, flag in KINDS.items()}  # integers: enum members are slow to combine
LATER_KINDS = {name: flag for name, flag in KINDS.items() if flag > ImageFlag.PNG}
"""The kinds that early readers of format 1.0 do not know."""


def kind_of(flags: int) -> str:
    """Return the name of the kind in an image's ``flags``."""
    return next((name for name, flag in _FLAGS.items() if flag & flags), "JPEG")


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """The properties of an image.

    Attributes:
        width: Pixels of the decoded image, before EXIF is applied.
        height: Pixels, likewise.
        components: Number of coded channels: 1 for gray, 2 for gray with alpha, 3 for colour (also from a
            palette), 4 for CMYK or colour with alpha.
        flags: The kind and unusual properties.
        orientation: EXIF orientation (1 to 8) of a JPEG or WebP; 1 without one, and for any other kind.
    """

    width: int
    height: int
    components: int
    flags: ImageFlag
    orientation: int = 1


DEFAULT_QUALITY = 90  # libjpeg's, of a shrunk image
MAX_GROWTH = 1.25  # an image that recoding enlarges more stays as it is, so that shard sizes can be planned

NO_IMAGE = ImageInfo(0, 0, 0, ImageFlag(0))  # of a record without an image


_CAUSES = ("not an image", "truncated", "too large", "does not decode", "crashes the decoder")


def cause_of(reason: str) -> str:
    """Return the cause in a message, such as "truncated", without the details of one image."""
    if reason.endswith(CONVERT_IT):
        return reason.removesuffix(CONVERT_IT)
    return next((cause for cause in _CAUSES if reason.startswith(cause)), "damaged")
