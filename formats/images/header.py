"""The properties of an image from its header, and its completeness from its structure.

Nothing is decoded: a decoder is not a checksum (it accepts 99.65 % of single flipped bytes), and takes a
hundred times as long. ``prep verify --level decode`` finds what only decoding can find.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from shardprep.formats.errors import BadImage
from shardprep.formats.images.info import MAX_PIXELS, ImageInfo, refuse_undecoded
from shardprep.formats.images.kinds import (
    BMP_SIGNATURE,
    GIF_SIGNATURES,
    JPEG_SIGNATURE,
    NETPBM_SIGNATURES,
    PNG_SIGNATURE,
    SUN_RASTER_SIGNATURE,
    WEBP_SIGNATURE,
    read_bmp,
    read_gif,
    read_jpeg,
    read_netpbm,
    read_png,
    read_sun_raster,
    read_webp,
)
from shardprep.formats.images.nested_kinds import (
    JPEG2000_SIGNATURES,
    TIFF_SIGNATURES,
    is_base_media,
    read_avif,
    read_jpeg2000,
    read_tiff,
)
from shardprep.formats.runtime.files import PASSING, reason_of

READERS: dict[tuple[bytes, ...], Callable[[bytes], ImageInfo]] = {
    (JPEG_SIGNATURE,): read_jpeg,
    (PNG_SIGNATURE,): read_png,
    (WEBP_SIGNATURE,): read_webp,
    TIFF_SIGNATURES: read_tiff,
    (BMP_SIGNATURE,): read_bmp,
    GIF_SIGNATURES: read_gif,
    JPEG2000_SIGNATURES: read_jpeg2000,
    NETPBM_SIGNATURES: read_netpbm,
    (SUN_RASTER_SIGNATURE,): read_sun_raster,
}
"""The reader of each kind, by the bytes that such a file starts with."""


def read_image_header(image: bytes) -> ImageInfo:
    """Return the properties of ``image``, the bytes of an image file, which decide its kind.

    Raises BadImage unless it is of a kind that OpenCV decodes (JPEG, PNG, WebP, TIFF, BMP, GIF, JPEG 2000,
    Netpbm, AVIF, Sun raster), and intact, as far as that shows without decoding: a JPEG has a frame, a scan
    and an end; a PNG's chunks match their CRCs and are in order, those of an animation included; the parts of
    any other file lie within it. More than ``MAX_PIXELS`` pixels or ``MAX_SCANS`` scans, and parts without
    end, are refused as attacks on the decoder.
    """
    try:
        info = _reader(image)(image)
    except PASSING:
        raise
    except Exception as error:  # hostile bytes may cause any exception; it stays visible as the cause
        raise BadImage(reason_of(error)) from error
    if not info.width or not info.height:
        raise BadImage(f"an image of {info.width}x{info.height} pixels")
    if info.width * info.height > MAX_PIXELS:
        raise BadImage(f"too large: {info.width}x{info.height} is more than {MAX_PIXELS} pixels")
    return info


def begins_as_image(head: bytes) -> bool:
    """Whether a file with these first bytes is an image of a kind that no text is taken for."""
    known = (JPEG_SIGNATURE, PNG_SIGNATURE, *TIFF_SIGNATURES, *GIF_SIGNATURES, *JPEG2000_SIGNATURES)
    return head.startswith(known) or head[8:12] in (b"WEBP", b"avif", b"heic")


def is_image_file(data: bytes) -> bool:
    """Whether the bytes begin like an image of a kind that is read."""
    return data.startswith(tuple(chain.from_iterable(READERS))) or is_base_media(data)


def _reader(image: bytes) -> Callable[[bytes], ImageInfo]:
    for signatures, reader in READERS.items():
        if image.startswith(signatures):
            return reader
    if is_base_media(image):
        return read_avif
    refuse_undecoded(image)
    raise BadImage(f"not an image (starts with {image[:8].hex(' ') or 'nothing'})")
