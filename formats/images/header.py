"""Reads the properties of an image from its header, and checks from its structure that it is complete.

Nothing is decoded: a decoder is no checksum (it accepts 99.65 % of single flipped bytes) and takes a hundred
times as long. ``prep verify --level decode`` finds what only decoding reveals.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from shardprep.formats.errors import BadImage
from shardprep.formats.images import kinds, rare_kinds as rare
from shardprep.formats.images.info import MAX_PIXELS, ImageInfo
from shardprep.formats.runtime.files import PASSING, reason_of

READERS: dict[tuple[bytes, ...], Callable[[bytes], ImageInfo]] = {
    (kinds.JPEG_SIGNATURE,): kinds.read_jpeg,
    (kinds.PNG_SIGNATURE,): kinds.read_png,
    (rare.WEBP_SIGNATURE,): rare.read_webp,
    rare.TIFF_SIGNATURES: rare.read_tiff,
    (rare.BMP_SIGNATURE,): rare.read_bmp,
    rare.GIF_SIGNATURES: rare.read_gif,
    rare.JPEG2000_SIGNATURES: rare.read_jpeg2000,
    rare.NETPBM_SIGNATURES: rare.read_netpbm,
    (rare.SUN_RASTER_SIGNATURE,): rare.read_sun_raster,
}
"""The reader of each kind of image, by its signatures."""

_NOT_DECODED = {
    b"\xff\x0a": "JPEG XL",
    b"\0\0\0\x0cJXL \r\n\x87\n": "JPEG XL",
    b"v/1\1": "OpenEXR",
    b"8BPS": "PSD",
    b"\0\0\1\0": "ICO",
    b"<svg": "SVG",
    b"%PDF": "PDF",
}
_DECODED_WRONGLY = {
    b"P7": "PAM",
    b"PF": "PFM",
    b"Pf": "PFM",
    b"#?RADIANCE": "Radiance HDR",
    b"#?RGBE": "Radiance HDR",
}
"""OpenCV reorders the channels of PAM, and clips the floats of the others at 255."""


def read_image_header(image: bytes) -> ImageInfo:
    """Return the properties of ``image``, the bytes of an image file; they alone determine its kind.

    Raises BadImage unless OpenCV decodes the kind (JPEG, PNG, WebP, TIFF, BMP, GIF, JPEG 2000, Netpbm, AVIF,
    Sun raster) and the file is intact, as far as that shows without decoding: a JPEG has a frame, a scan and
    an end; a PNG's chunks, with those of an animation, match their CRCs and are in order; the parts of any
    other file lie within it. More than ``MAX_PIXELS`` pixels, ``MAX_SCANS`` scans or endless parts count as
    attacks on the decoder.
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
    """Whether a file with these first bytes is certainly an image: no text begins like it."""
    known: tuple[bytes, ...] = (kinds.JPEG_SIGNATURE, kinds.PNG_SIGNATURE, *rare.TIFF_SIGNATURES)
    known += (*rare.GIF_SIGNATURES, *rare.JPEG2000_SIGNATURES)
    return head.startswith(known) or head[8:12] in (b"WEBP", b"avif", b"heic")


def is_image_file(data: bytes) -> bool:
    """Whether the bytes begin like an image that can be read."""
    return data.startswith(tuple(chain.from_iterable(READERS))) or rare.is_base_media(data)


def _reader(image: bytes) -> Callable[[bytes], ImageInfo]:
    for signatures, reader in READERS.items():
        if image.startswith(signatures):
            return reader
    if rare.is_base_media(image):
        return rare.read_avif
    for names, error in ((_NOT_DECODED, rare.not_decoded), (_DECODED_WRONGLY, rare.decoded_wrongly)):
        for signature, name in names.items():
            if image.startswith(signature):
                raise error(name)
    begins = f"starts with {image[:8].hex(' ')}" if image else "empty"
    raise BadImage(f"not an image ({begins})")
