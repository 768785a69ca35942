"""Reads the properties of JPEG and PNG files and checks that they are complete, without decoding."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress

from shardprep.formats.errors import BadImage
from shardprep.formats.images.info import ImageFlag, ImageInfo

JPEG_SIGNATURE = b"\xff\xd8\xff"
MAX_MARKERS = 10_000  # before the first scan, with fill bytes; photographs have dozens
MAX_SCANS = 100  # libjpeg decodes a progressive file once per scan: thousands are an attack

SOI, EOI, SOS, APP1, APP14 = 0xD8, 0xD9, 0xDA, 0xE1, 0xEE
STARTS_OF_FRAME = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # DHT, JPG and DAC lie among them
PROGRESSIVE_FRAMES = frozenset({0xC2, 0xC6, 0xCA, 0xCE})
STANDALONE = frozenset({0x01, *range(0xD0, 0xD8)})


def read_jpeg(image: bytes) -> ImageInfo:
    """Return the properties of a JPEG. Raises BadImage unless it has a frame, a scan and an end."""
    flags, orientation = ImageFlag(0), 1
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
    """Return width and height from a JPEG's first frame; None if it has no frame or no size."""
    if image[: len(JPEG_SIGNATURE)] != JPEG_SIGNATURE:
        return None
    with suppress(BadImage):
        for marker, start, stop in marker_segments(image):
            if marker in STARTS_OF_FRAME:
                height, width, _ = _frame(image[start:stop])
                return (width, height) if width and height else None
    return None


def jpeg_orientation(image: bytes | bytearray | memoryview) -> int | None:
    """Return the EXIF orientation of a JPEG, 1 without one; None if corrupt, or not a JPEG."""
    orientation: int | None = 1
    if image[: len(JPEG_SIGNATURE)] != JPEG_SIGNATURE:
        return None
    try:
        for marker, start, stop in marker_segments(image):
            if marker == APP1 and image[start : start + 6] == b"Exif\0\0":
                orientation = exif_orientation(bytes(image[start + 6 : stop]))
    except BadImage:
        return None
    return orientation


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
    """Return (height, width, components) from the payload of a start of frame."""
    if len(payload) < 6 or len(payload) < 6 + 3 * payload[5]:
        raise BadImage("a JPEG frame header that is too short")
    _, height, width, components = struct.unpack_from(">BHHB", payload)
    if components not in (1, 3, 4):
        raise BadImage(f"a JPEG of {components} components")
    return height, width, components


def _scans_end(image: bytes, start: int, *, several: bool) -> ImageFlag:
    """Check that the coded data from ``start`` has an end marker; in the data 0x00 follows every 0xFF."""
    end = image.rfind(b"\xff\xd9", start)
    if end < 0:
        raise BadImage("truncated: the JPEG has no end")
    if several and image.count(b"\xff\xda", start) >= MAX_SCANS:
        raise BadImage(f"a JPEG of more than {MAX_SCANS} scans")
    return ImageFlag(0) if end + 2 == len(image) else ImageFlag.TRAILING_BYTES


def exif_orientation(tiff: bytes) -> int | None:
    """Return the orientation (1 to 8) in an EXIF block; 1 without one, None if the block is corrupt."""
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


PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
PALETTE = 3  # a colour type
COMPONENTS = {0: 1, 2: 3, PALETTE: 3, 4: 2, 6: 4}  # by colour type; a palette expands to RGB
ANIMATION = frozenset([b"acTL", b"fcTL", b"fdAT"])

_LETTERS = {b"IHDR": "H", b"PLTE": "P", b"IDAT": "D", b"IEND": "E"}
_ORDER = re.compile("H[P.]*D+[.]*E")
_HEAD = struct.Struct(">I4s")  # the length of a chunk's data, and its kind
_REST = _HEAD.size + 4  # with the CRC after the data


def read_png(image: bytes) -> ImageInfo:
    """Return the properties of a PNG. Raises BadImage unless its chunks are complete, known and in order.

    Unknown chunks are allowed unless they are critical. The frames of an animation are not looked at.
    """
    width, height, colour, end = _walked(image)
    trailing = ImageFlag.TRAILING_BYTES if end != len(image) else ImageFlag(0)
    return ImageInfo(width, height, COMPONENTS[colour], ImageFlag.PNG | trailing)


def _walked(image: bytes) -> tuple[int, int, int, int]:
    """Check all chunks, and return width, height, colour type and the end of the last chunk."""
    view = memoryview(image)
    width = height = colour = 0
    order = ""  # a letter for each chunk
    for kind, start, stop in _chunks(image):
        if stop > len(image):
            break
        if zlib.crc32(view[start + 4 : stop - 4]) != int.from_bytes(view[stop - 4 : stop], "big"):
            raise BadImage(f"a PNG chunk at byte {start} does not match its CRC")
        data = view[start + _HEAD.size : stop - 4]
        if not order:
            if kind != b"IHDR" or len(data) != 13:
                raise BadImage("a PNG without its header")
            width, height, _, colour = struct.unpack_from(">IIBB", data)
            if colour not in COMPONENTS:
                raise BadImage(f"a PNG of unknown colour type {colour}")
        letter = _LETTERS.get(kind, ".")
        if not kind.isalpha() or (letter == "." and kind[:1].isupper()):
            raise BadImage(f"a PNG with a critical chunk of the unknown kind {kind.decode('latin-1')!r}")
        order += letter
        if kind == b"IEND":
            if not _ORDER.fullmatch(order) or (colour == PALETTE and "P" not in order):
                raise BadImage("a PNG with chunks out of order")
            return width, height, colour, stop
    raise BadImage("truncated: the PNG has no end")


def without_animation(image: bytes) -> bytes:
    """Return a PNG without its animation, for which OpenCV writes out of bounds. Raises BadImage."""
    if all(kind not in ANIMATION for kind, _, _ in _chunks(image)):
        return image
    *_, end = _walked(image)
    still = (image[start:stop] for kind, start, stop in _chunks(image[:end]) if kind not in ANIMATION)
    return PNG_SIGNATURE + b"".join(still)


def as_gray(image: bytes, *, key: str | None = None) -> tuple[bytes, int] | None:
    """Return the raw samples of a gray or palette PNG as a gray PNG, and the bits per sample.

    The palette and all other chunks not needed to decode are dropped. Returns None for a PNG with colours or
    alpha. Raises BadImage, with ``key``, for a PNG that :func:`read_png` refuses.
    """
    try:
        _, _, colour, end = _walked(image)
    except BadImage as error:
        raise BadImage(error.message, key=key) from error
    if COMPONENTS[colour] != 1 and colour != PALETTE:
        return None
    kept = {b"IHDR": b"", b"IDAT": b"", b"IEND": b""}
    for kind, start, stop in _chunks(image[:end]):
        if kind in kept:
            kept[kind] += image[start:stop]
    header = bytearray(kept[b"IHDR"][: _HEAD.size + 13])
    header[_HEAD.size + 9] = 0  # the colour type
    checked = header + zlib.crc32(header[4:]).to_bytes(4, "big")
    return PNG_SIGNATURE + checked + kept[b"IDAT"] + kept[b"IEND"], header[_HEAD.size + 8]


def png_orientation(image: bytes) -> int | None:
    """Return the EXIF orientation of a PNG, 1 without one; None if corrupt, or not a PNG."""
    if not image.startswith(PNG_SIGNATURE):
        return None
    for kind, start, stop in _chunks(image):
        if kind == b"eXIf":
            return exif_orientation(image[start + _HEAD.size : stop - 4])
    return 1


def _chunks(image: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield kind, start and stop of each chunk; the last stop may lie beyond the end of the image."""
    at = len(PNG_SIGNATURE)
    while at + _HEAD.size <= len(image):
        length, kind = _HEAD.unpack_from(image, at)
        yield kind, at, at + _REST + length
        at += _REST + length
