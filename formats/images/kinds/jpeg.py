"""A JPEG by its markers: its properties and its completeness."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from shardprep.formats.errors import BadImage

from .image_info import ImageFlag, ImageInfo
from .tiff import exif_orientation

SIGNATURE = b"\xff\xd8\xff"
MAX_MARKERS = 10_000  # before the first scan, with fill bytes; photographs have some dozens
MAX_SCANS = 100  # libjpeg decodes a progressive file once per scan: thousands are an attack

SOI, EOI, SOS, APP1, APP14 = 0xD8, 0xD9, 0xDA, 0xE1, 0xEE
STARTS_OF_FRAME = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # DHT, JPG and DAC lie among them
PROGRESSIVE_FRAMES = frozenset({0xC2, 0xC6, 0xCA, 0xCE})
STANDALONE = frozenset({0x01, *range(0xD0, 0xD8)})


def read_jpeg(image: bytes) -> ImageInfo:
    """Return the properties of a JPEG. Raises BadImage unless it has a frame, a scan and an end."""
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
    if image[: len(SIGNATURE)] != SIGNATURE:
        return None
    try:
        for marker, start, stop in marker_segments(image):
            if marker in STARTS_OF_FRAME:
                height, width, _ = _frame(image[start:stop])
                return (width, height) if width and height else None
    except BadImage:
        return None
    return None


def jpeg_orientation(image: bytes | bytearray | memoryview) -> int | None:
    """Return EXIF's orientation of a JPEG, 1 if there is none; None if it is corrupt, or for no JPEG."""
    orientation: int | None = 1
    if image[: len(SIGNATURE)] != SIGNATURE:
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
