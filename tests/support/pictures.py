"""Encoded images for tests: photographs, and kinds that no photograph here has."""

from __future__ import annotations

import struct
from importlib import resources

import cv2
import numpy as np
import numpy.typing as npt


def photograph(name: str) -> bytes:
    """A photograph of the project."""
    return (resources.files("shardprep.formats.sample.photographs") / name).read_bytes()


def png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """A PNG of BGR, BGRA or gray pixels."""
    return cv2.imencode(".png", pixels)[1].tobytes()


def with_orientation(jpeg: bytes, orientation: int) -> bytes:
    """The JPEG with an EXIF segment that has only this orientation."""
    entry = struct.pack(">HHIHH", 0x0112, 3, 1, orientation, 0)
    exif = b"Exif\0\0" + b"MM\0\x2a" + struct.pack(">IH", 8, 1) + entry + bytes(4)
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
