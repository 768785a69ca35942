"""The properties of an image from its header, and its completeness from its structure.

Nothing is decoded: a decoder is not a checksum (it accepts 99.65 % of single flipped bytes), and takes a
hundred times as long. ``prep verify --level decode`` finds what only decoding can find.
"""

from __future__ import annotations

from collections.abc import Callable

from shardprep.formats.errors import BadImage
from shardprep.formats.system.foreign_file import PASSING, reason_of

from .kinds import avif, bmp, gif, jpeg, jpeg2000, netpbm, png, sun_raster, tiff, webp
from .kinds.image_info import MAX_PIXELS, ImageInfo
from .undecoded import refuse_undecoded

READERS: dict[tuple[bytes, ...], Callable[[bytes], ImageInfo]] = {
    (jpeg.SIGNATURE,): jpeg.read_jpeg,
    (png.SIGNATURE,): png.read_png,
    (webp.SIGNATURE,): webp.read_webp,
    tiff.SIGNATURES: tiff.read_tiff,
    (bmp.SIGNATURE,): bmp.read_bmp,
    gif.SIGNATURES: gif.read_gif,
    jpeg2000.SIGNATURES: jpeg2000.read_jpeg2000,
    netpbm.SIGNATURES: netpbm.read_netpbm,
    (sun_raster.SIGNATURE,): sun_raster.read_sun_raster,
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


def _reader(image: bytes) -> Callable[[bytes], ImageInfo]:
    for signatures, reader in READERS.items():
        if image.startswith(signatures):
            return reader
    if avif.is_base_media(image):
        return avif.read_avif
    refuse_undecoded(image)
    raise BadImage(f"not an image (starts with {image[:8].hex(' ') or 'nothing'})")
