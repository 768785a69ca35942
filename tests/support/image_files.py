"""Images for tests: encoded by OpenCV, or built byte by byte."""

import struct
import zlib
from importlib import resources

import cv2
import numpy as np
import numpy.typing as npt

_FOLDER = resources.files("shardprep.formats") / "data/photographs"
PHOTOGRAPHS = sorted((f for f in _FOLDER.iterdir() if f.name.endswith(".jpg")), key=lambda file: file.name)


def photograph(name: str) -> bytes:
    """A photograph of the project."""
    return (_FOLDER / name).read_bytes()


def pixels(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


def encoded(image: np.ndarray, suffix: str = ".jpg", *options: int) -> bytes:
    return cv2.imencode(suffix, image, options)[1].tobytes()


JPEG = encoded(pixels(6, 9, 3))
PROGRESSIVE = encoded(pixels(6, 9, 3), ".jpg", cv2.IMWRITE_JPEG_PROGRESSIVE, 1)


def chunk(kind: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_head(width: int, height: int, colour: int, bits: int = 8) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)


def png(width: int, height: int, colour: int, *chunks: bytes) -> bytes:
    """A black PNG of 8 bits of any colour type."""
    channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}.get(colour, 1)
    rows = chunk(b"IDAT", zlib.compress(bytes(height * (1 + channels * width))))
    return png_head(width, height, colour) + b"".join(chunks) + rows + chunk(b"IEND")


def numbers_png(numbers: npt.NDArray[np.unsignedinteger], *, bits: int = 8, palette: bool = True) -> bytes:
    """A PNG of samples of so many bits, with a palette of colours in reverse order, or gray."""
    if bits == 16:
        rows = numbers.astype(">u2").view(np.uint8).reshape(len(numbers), -1)
    else:
        each = ((numbers[:, :, None] >> np.arange(bits - 1, -1, -1)) & 1).reshape(len(numbers), -1)
        rows = np.packbits(each.astype(np.uint8), axis=1)
    colours = b"".join(bytes([255 - n, 7, n]) for n in range(1 << bits)) if palette else b""
    chunks = chunk(b"PLTE", colours) + chunk(b"tRNS", b"\0") if palette else b""
    data = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
    head = png_head(numbers.shape[1], len(numbers), 3 if palette else 0, bits)
    return head + chunks + chunk(b"IDAT", data) + chunk(b"IEND")


def segment(marker: int, data: bytes = b"") -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(data) + 2) + data


def frame(width: int, height: int, components: int = 3, marker: int = 0xC0) -> bytes:
    parts = b"".join(bytes([number, 0x11, 0]) for number in range(components))
    return segment(marker, struct.pack(">BHHB", 8, height, width, components) + parts)


def scan(components: int = 3) -> bytes:
    parts = b"".join(bytes([number, 0]) for number in range(components))
    return segment(0xDA, bytes([components]) + parts + b"\0\x3f\0") + b"data"


def skeleton(*segments: bytes) -> bytes:
    """A JPEG of these segments: a header can be read from it, but nothing decoded."""
    return b"\xff\xd8" + b"".join(segments) + b"\xff\xd9"


def tiff(order: str, *entries: tuple[int, int, int]) -> bytes:
    """An EXIF block of one directory of (tag, kind, value), in byte order ``<`` or ``>``."""
    start = {"<": b"II", ">": b"MM"}[order] + struct.pack(order + "HIH", 42, 8, len(entries))
    rows = (struct.pack(order + "HHIHH", tag, kind, 1, value, 0) for tag, kind, value in entries)
    return start + b"".join(rows) + bytes(4)


def with_exif(jpeg: bytes, block: bytes) -> bytes:
    return jpeg[:2] + segment(0xE1, b"Exif\0\0" + block) + jpeg[2:]


def exif_of(orientation: int) -> bytes:
    """An EXIF block that has only this orientation."""
    return tiff(">", (0x0112, 3, orientation))


def with_orientation(jpeg: bytes, orientation: int) -> bytes:
    return with_exif(jpeg, exif_of(orientation))


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
    return skeleton(*(segment(marker, data) for marker, data in segments), b"\0")


def acTL(frames: int, plays: int = 0) -> bytes:  # noqa: N802 - as PNG calls it
    """The chunk that declares an animation."""
    return chunk(b"acTL", struct.pack(">II", frames, plays))


def fcTL(  # noqa: N802
    number: int, width: int, height: int, x: int = 0, y: int = 0, disposal: int = 0, blending: int = 0
) -> bytes:
    """The chunk that begins a frame of an animation."""
    return chunk(b"fcTL", struct.pack(">IIIIIHHBB", number, width, height, x, y, 1, 10, disposal, blending))


def fdAT(number: int, data: bytes = zlib.compress(bytes(10))) -> bytes:  # noqa: N802
    """The chunk with data of a frame."""
    return chunk(b"fdAT", struct.pack(">I", number) + data)


def animated(*chunks: bytes, before: bytes = b"") -> bytes:
    """A black PNG of 3 x 2 pixels with these chunks after the image, and ``before`` before it."""
    head = png_head(3, 2, 0)
    return head + before + png(3, 2, 0)[len(head) : -12] + b"".join(chunks) + chunk(b"IEND")
