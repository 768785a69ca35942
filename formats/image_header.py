"""What an image is, read from its header; whether it is whole, read from its markers.

Nothing is decoded: a decoder is no checksum (of single flipped bytes it accepts 99.65 %), and
costs a hundred times as much. What only decoding can find is left to ``prep verify --level decode``.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntFlag

from .errors import BadImage

MAX_PIXELS = 1 << 26  # 64 Mpx decode to 200 MB; ILSVRC12's largest image has 40 Mpx
MAX_SCANS = 100  # libjpeg decodes every scan of a progressive file anew: thousands are an attack

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
PNG_COMPONENTS = {0: 1, 2: 3, 3: 3, 4: 2, 6: 4}  # by colour type; a palette (3) expands to RGB

SOI, EOI, SOS, APP1, APP14 = 0xD8, 0xD9, 0xDA, 0xE1, 0xEE
STARTS_OF_FRAME = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # DHT, JPG and DAC lie among them
PROGRESSIVE_FRAMES = frozenset({0xC2, 0xC6, 0xCA, 0xCE})
STANDALONE = frozenset({0x01, *range(0xD0, 0xD8)})


class ImageFlag(IntFlag):
    """What is peculiar about an image; stored in the index column ``flags``."""

    PNG = 1
    PROGRESSIVE = 2
    ADOBE = 4
    TRAILING_BYTES = 8
    CORRUPT_EXIF = 16


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """Size in stored pixels (EXIF not applied), channels as coded, and what is peculiar.

    ``components`` is 1 for gray, 3 for colour, 4 for CMYK (JPEG) or RGBA (PNG);
    ``orientation`` is EXIF's 1…8, 1 where there is none.
    """

    width: int
    height: int
    components: int
    flags: ImageFlag
    orientation: int = 1


def read_image_header(image: bytes) -> ImageInfo:
    """What ``image`` is. Pure. Raises BadImage, saying why, for anything but an intact JPEG or PNG.

    Intact means: the markers lead to a frame and a scan and the end is there. More than
    ``MAX_PIXELS`` pixels or ``MAX_SCANS`` scans are refused as attacks on the decoder.
    """
    if image.startswith(b"\xff\xd8\xff"):
        info = _read_jpeg(image)
    elif image.startswith(PNG_SIGNATURE):
        info = _read_png(image)
    else:
        raise BadImage(f"neither JPEG nor PNG (starts with {image[:8].hex(' ') or 'nothing'})")
    if not info.width or not info.height:
        raise BadImage(f"an image of {info.width}x{info.height} pixels")
    if info.width * info.height > MAX_PIXELS:
        raise BadImage(f"{info.width}x{info.height} is more than {MAX_PIXELS} pixels")
    return info


def _read_png(image: bytes) -> ImageInfo:
    """Walks the chunks, each of which has a CRC-32 of its own."""
    at = len(PNG_SIGNATURE)
    header = b""
    kind = b""
    while kind != b"IEND":
        length, kind = struct.unpack(">I4s", image[at : at + 8].ljust(8, b"\0"))
        stop = at + 12 + length
        if stop > len(image):
            raise BadImage("truncated: the PNG has no end")
        if zlib.crc32(image[at + 4 : stop - 4]) != int.from_bytes(image[stop - 4 : stop], "big"):
            raise BadImage(f"a PNG chunk at byte {at} does not match its CRC")
        header = header or image[at + 4 : stop - 4]
        at = stop
    if not header.startswith(b"IHDR") or len(header) != 17:
        raise BadImage("a PNG without its header")
    width, height, _, colour = struct.unpack_from(">IIBB", header, 4)
    if colour not in PNG_COMPONENTS:
        raise BadImage(f"a PNG of unknown colour type {colour}")
    trailing = ImageFlag.TRAILING_BYTES if at != len(image) else ImageFlag(0)
    return ImageInfo(width, height, PNG_COMPONENTS[colour], ImageFlag.PNG | trailing)


def _read_jpeg(image: bytes) -> ImageInfo:
    flags = ImageFlag(0)
    orientation = 1
    frame: tuple[int, int, int] | None = None
    for marker, start, stop in _segments(image):
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


def _segments(image: bytes) -> Iterator[tuple[int, int, int]]:
    """(marker, start, stop) of each segment's payload, up to the first scan's header, inclusive."""
    at = 2
    while True:
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


def _frame(payload: bytes) -> tuple[int, int, int]:
    """(height, width, components) of a start of frame."""
    if len(payload) < 6 or len(payload) < 6 + 3 * payload[5]:
        raise BadImage("a JPEG frame header that is too short")
    _, height, width, components = struct.unpack_from(">BHHB", payload)
    if components not in (1, 3, 4):
        raise BadImage(f"a JPEG of {components} components")
    return height, width, components


def _scans_end(image: bytes, start: int, *, several: bool) -> ImageFlag:
    """Check that the coded data from ``start`` ends; inside it 0xFF is always followed by 0x00."""
    end = image.rfind(b"\xff\xd9", start)
    if end < 0:
        raise BadImage("truncated: the JPEG has no end")
    if several and image.count(b"\xff\xda", start) >= MAX_SCANS:
        raise BadImage(f"a JPEG of more than {MAX_SCANS} scans")
    return ImageFlag(0) if end + 2 == len(image) else ImageFlag.TRAILING_BYTES


def exif_orientation(tiff: bytes) -> int | None:
    """The orientation (1…8) in an EXIF block, 1 where it has none, None where the block is corrupt."""
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
