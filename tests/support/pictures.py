"""Encoded images for tests: photographs, and kinds that no photograph here has."""

from __future__ import annotations

import struct
import zlib
from importlib import resources

import cv2
import numpy as np
import numpy.typing as npt


def photograph(name: str) -> bytes:
    """A photograph of the project."""
    return (resources.files("shardprep.formats.data.photographs") / name).read_bytes()


def png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """A PNG of BGR, BGRA or gray pixels."""
    return cv2.imencode(".png", pixels)[1].tobytes()


def exif_of(orientation: int) -> bytes:
    """An EXIF block that has only this orientation."""
    entry = struct.pack(">HHIHH", 0x0112, 3, 1, orientation, 0)
    return b"MM\0\x2a" + struct.pack(">IH", 8, 1) + entry + bytes(4)


def with_orientation(jpeg: bytes, orientation: int) -> bytes:
    """The JPEG with an EXIF segment that has only this orientation."""
    exif = b"Exif\0\0" + exif_of(orientation)
    return jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif + jpeg[2:]


def cmyk_jpeg() -> bytes:
    """8 x 8 pixels of Adobe CMYK with every sample 128."""
    segments = [
        (0xEE, b"Adobe" + bytes([0, 100, 0, 0, 0, 0, 0])),
        (0xDB, bytes([0]) + bytes([1] * 64)),
        (0xC0, bytes([8, 0, 8, 0, 8, 4]) + b"".join(bytes([c, 0x11, 0]) for c in (1, 2, 3, 4))),
        (0xC4, bytes([0x00, 1, *[0] * 15, 0])),
        (0xC4, bytes([0x10, 1, *[0] * 15, 0])),
        (0xDA, bytes([4]) + b"".join(bytes([c, 0]) for c in (1, 2, 3, 4)) + bytes([0, 63, 0])),
    ]
    body = b"".join(struct.pack(">BBH", 0xFF, code, len(data) + 2) + data for code, data in segments)
    return b"\xff\xd8" + body + b"\x00" + b"\xff\xd9"


def numbers_png(numbers: npt.NDArray[np.uint8], *, bits: int = 8, palette: bool = True) -> bytes:
    """A PNG of samples of so many bits, with a palette of colours in reverse order, or gray."""
    levels = 1 << bits
    if bits == 16:
        rows = numbers.astype(">u2").view(np.uint8).reshape(len(numbers), -1)
    else:
        each = ((numbers[:, :, None] >> np.arange(bits - 1, -1, -1)) & 1).reshape(len(numbers), -1)
        rows = np.packbits(each.astype(np.uint8), axis=1)
    header = struct.pack(">IIBBBBB", numbers.shape[1], len(numbers), bits, 3 if palette else 0, 0, 0, 0)
    colours = b"".join(bytes([255 - n, 7, n]) for n in range(levels)) if palette else b""
    data = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
    chunks = [(b"IHDR", header), (b"PLTE", colours), (b"tRNS", b"\0"), (b"IDAT", data), (b"IEND", b"")]
    kept = chunks if palette else [each for each in chunks if each[0] not in (b"PLTE", b"tRNS")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(kind, data) for kind, data in kept)


def png_chunk(kind: bytes, data: bytes) -> bytes:
    """A chunk of a PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
