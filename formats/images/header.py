"""The properties of an image from its header, and its completeness from its markers.

Nothing is decoded: a decoder is not a checksum (it accepts 99.65 % of single flipped bytes), and takes a
hundred times as long. ``prep verify --level decode`` finds what only decoding can find.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntFlag

from shardprep.formats.errors import BadImage
from shardprep.formats.system.foreign_file import PASSING, reason_of

from . import png

MAX_PIXELS = 1 << 26  # 64 Mpx decode to 200 MB; ILSVRC12's largest image has 40 Mpx
EXTREME_ASPECT = 16  # longer to shorter side: resized whole, such an image would take all memory
MAX_MARKERS = 10_000  # before the first scan, with fill bytes; photographs have some dozens
MAX_SCANS = 100  # libjpeg decodes a progressive file once per scan: thousands are an attack

SOI, EOI, SOS, APP1, APP14 = 0xD8, 0xD9, 0xDA, 0xE1, 0xEE
STARTS_OF_FRAME = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # DHT, JPG and DAC lie among them
PROGRESSIVE_FRAMES = frozenset({0xC2, 0xC6, 0xCA, 0xCE})
STANDALONE = frozenset({0x01, *range(0xD0, 0xD8)})


class ImageFlag(IntFlag):
    """The unusual properties of an image; stored in the index column ``flags``."""

    PNG = 1
    PROGRESSIVE = 2
    ADOBE = 4
    TRAILING_BYTES = 8
    CORRUPT_EXIF = 16
    CROP_READY = 1 << 15


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """The properties of an image.

    ``width`` and ``height`` are in stored pixels (EXIF not applied). ``components`` is the number of coded
    channels: 1 for gray, 2 for gray with alpha (PNG), 3 for colour, 4 for CMYK (JPEG) or RGBA (PNG).
    ``flags`` are the unusual properties. ``orientation`` is EXIF's, 1 to 8, and 1 if there is none.
    """

    width: int
    height: int
    components: int
    flags: ImageFlag
    orientation: int = 1


def read_image_header(image: bytes) -> ImageInfo:
    """Return the properties of ``image``, the bytes of a JPEG or PNG file.

    Raises BadImage unless it is an intact JPEG or PNG: a JPEG has a frame, a scan and an end; a PNG's chunks
    match their CRCs and are in order, those of an animation included. More than ``MAX_PIXELS`` pixels or
    ``MAX_SCANS`` scans are refused as attacks on the decoder.
    """
    try:
        info = _read(image)
    except PASSING:
        raise
    except Exception as error:  # hostile bytes may cause any exception; it stays visible as the cause
        raise BadImage(reason_of(error)) from error
    if not info.width or not info.height:
        raise BadImage(f"an image of {info.width}x{info.height} pixels")
    if info.width * info.height > MAX_PIXELS:
        raise BadImage(f"{info.width}x{info.height} is more than {MAX_PIXELS} pixels")
    return info


def _read(image: bytes) -> ImageInfo:
    if image.startswith(b"\xff\xd8\xff"):
        return _read_jpeg(image)
    if image.startswith(png.SIGNATURE):
        return _read_png(image)
    raise BadImage(f"neither JPEG nor PNG (starts with {image[:8].hex(' ') or 'nothing'})")


def _read_png(image: bytes) -> ImageInfo:
    found = png.read_png(image)
    trailing = ImageFlag.TRAILING_BYTES if found.end != len(image) else ImageFlag(0)
    return ImageInfo(found.width, found.height, found.components, ImageFlag.PNG | trailing)


def _read_jpeg(image: bytes) -> ImageInfo:
    flags = ImageFlag(0)
    orientation = 1
    frame: tuple[int, int, int] | None = None
    for marker, start, stop in marker_segments(image):
        if marker in STARTS_OF_FRAME and frame is None:
            frame = _frame(image[start:stop])
            if marker in PROGRESSIVE_FRAMES:
                flags |= ImageFlag.PROGRESSIVE
        elif marker == APP14 and image[start : start + 5] == b"Adobe":
            flags |= ImageFlag.ADOBE
        elif marker == APP1 and image[start : start + 6] == b"Exif\0\0":
            found = exif_orientation(image[start + 6 : stop])
            orientation, flags = (found, flags) if found else (1, flags | ImageFlag.CORRUPT_EXIF)
        elif marker == SOS:
            if frame is None or start == stop:
                raise BadImage("a JPEG scan without a frame, or without components")
            several = bool(flags & ImageFlag.PROGRESSIVE) or image[start] < frame[2]
            flags |= _scans_end(image, stop, several=several)
    if frame is None:
        raise BadImage("a JPEG without a frame")
    height, width, components = frame
    return ImageInfo(width, height, components, flags, orientation)


def jpeg_size(image: bytes | bytearray | memoryview) -> tuple[int, int] | None:
    """Return width and height from a JPEG's first frame; None if there is none, or no size in it."""
    if image[:3] != b"\xff\xd8\xff":
        return None
    try:
        for marker, start, stop in marker_segments(image):
            if marker in STARTS_OF_FRAME:
                height, width, _ = _frame(image[start:stop])
                return (width, height) if width and height else None
    except BadImage:
        return None
    return None


def marker_segments(image: bytes | bytearray | memoryview) -> Iterator[tuple[int, int, int]]:
    """Yield (marker, start, stop) of each segment's payload, up to and including the first scan's header."""
    at = 2
    for _ in range(MAX_MARKERS):
        if at + 4 > len(image):
            raise BadImage("truncated: the JPEG ends before its first scan")
        if image[at] != 0xFF:
            raise BadImage(f"not a JPEG marker at byte {at}")
        marker = image[at + 1]
        if marker == 0xFF:  # fill byte
            at += 1
        elif marker in STANDALONE:
            at += 2
        elif marker in (SOI, EOI, 0x00):
            raise BadImage(f"JPEG marker {marker:#04x} at byte {at}, before any scan")
        else:
            stop = at + 2 + int.from_bytes(image[at + 2 : at + 4], "big")
            if stop < at + 4 or stop > len(image):
                raise BadImage(f"a JPEG segment at byte {at} does not fit")
            yield marker, at + 4, stop
            if marker == SOS:
                return
            at = stop
    raise BadImage(f"a JPEG of more than {MAX_MARKERS} markers before its first scan")


def _frame(payload: bytes | bytearray | memoryview) -> tuple[int, int, int]:
    """Return (height, width, components) of a start of frame."""
    if len(payload) < 6 or len(payload) < 6 + 3 * payload[5]:
        raise BadImage("a JPEG frame header that is too short")
    _, height, width, components = struct.unpack_from(">BHHB", payload)
    if components not in (1, 3, 4):
        raise BadImage(f"a JPEG of {components} components")
    return height, width, components


def _scans_end(image: bytes, start: int, *, several: bool) -> ImageFlag:
    """Check that the coded data from ``start`` has an end; within it 0x00 follows every 0xFF."""
    end = image.rfind(b"\xff\xd9", start)
    if end < 0:
        raise BadImage("truncated: the JPEG has no end")
    if several and image.count(b"\xff\xda", start) >= MAX_SCANS:
        raise BadImage(f"a JPEG of more than {MAX_SCANS} scans")
    return ImageFlag(0) if end + 2 == len(image) else ImageFlag.TRAILING_BYTES


def exif_orientation(tiff: bytes) -> int | None:
    """Return the orientation (1 to 8) in an EXIF block, 1 if it has none, None if the block is corrupt."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    try:
        if order is None:
            return None
        (at,) = struct.unpack_from(order + "I", tiff, 4)
        (count,) = struct.unpack_from(order + "H", tiff, at)
        for entry in range(at + 2, at + 2 + 12 * count, 12):
            tag, kind, _, value = struct.unpack_from(order + "HHIH", tiff, entry)
            if tag == 0x0112:
                return value if kind == 3 and 1 <= value <= 8 else None
    except struct.error:
        return None
    return 1
