"""Images of every kind that is decoded, made by OpenCV, or of what it made."""

import struct

import cv2
import numpy as np

from shardprep.formats.images.header import ImageFlag, ImageInfo
from support.image_files import encoded, tiff


def photograph(height: int = 34) -> np.ndarray:
    """A smooth image, which lossy formats keep nearly."""
    y, x = np.mgrid[0:height, 0:45]
    return np.dstack([x * 5, y * 7, (x + y) * 3]).astype(np.uint8)


def chunk_of_riff(kind: bytes, data: bytes) -> bytes:
    return kind + struct.pack("<I", len(data)) + data + bytes(len(data) % 2)


def webp(*chunks: bytes) -> bytes:
    return b"RIFF" + struct.pack("<I", 4 + sum(map(len, chunks))) + b"WEBP" + b"".join(chunks)


def extended_webp(*after: bytes, width: int = 45, height: int = 34) -> bytes:
    """A lossless WebP with a canvas and more chunks."""
    size = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return webp(chunk_of_riff(b"VP8X", bytes([8, 0, 0, 0]) + size), LOSSLESS[12:], *after)


def animation(suffix: str) -> bytes:
    frames = cv2.Animation()
    frames.frames = [photograph(), photograph() + 20]
    frames.durations = [100, 100]
    return cv2.imencodeanimation(suffix, frames)[1].tobytes()


def codestream(jp2: bytes) -> bytes:
    return jp2[jp2.index(b"\xff\x4f\xff\x51") :]


def raw_tiff(order: str = "<", *, big: bool = False, data: bytes = b"", **tags: int | None) -> bytes:
    """A TIFF of one strip, 45 x 34 gray pixels of 8 bits; ``tags``, named by their numbers, change that."""
    data = data or photograph()[..., 0].tobytes()
    values = {
        "256": 45,
        "257": 34,
        "258": 8,
        "259": 1,
        "262": 1,
        "273": 0,
        "277": 1,
        "278": 34,
        "279": len(data),
    }
    entries = sorted((int(name), value) for name, value in (values | tags).items() if value is not None)
    count, entry, pointer, head = ("Q", 20, "Q", 16) if big else ("H", 12, "I", 8)
    start = head + struct.calcsize(count) + len(entries) * entry + struct.calcsize(pointer)
    magic = struct.pack(order + "HHH", 43, 8, 0) if big else struct.pack(order + "H", 42)
    rows = b"".join(
        struct.pack(order + ("HHQI4x" if big else "HHII"), tag, 4, 1, start if tag == 273 else value)
        for tag, value in entries
    )
    begin = {"<": b"II", ">": b"MM"}[order] + magic + struct.pack(order + pointer, head)
    return begin + struct.pack(order + count, len(entries)) + rows + bytes(struct.calcsize(pointer)) + data


def bmp(bits: int, data: bytes = b"", *, packing: int = 0, palette: bytes = b"", rest: bytes = b"") -> bytes:
    """A BMP of 5 x 4 pixels."""
    data = data or bytes((5 * bits + 31) // 32 * 4 * 4)
    start = 54 + len(rest) + len(palette)
    head = struct.pack("<IiiHHIIiiII", 40, 5, 4, 1, bits, packing, len(data), 0, 0, len(palette) // 4, 0)
    return b"BM" + struct.pack("<IHHI", start + len(data), 0, 0, start) + head + rest + palette + data


COLOUR, GRAY = photograph(), photograph()[..., 0].copy()
ALPHA = np.dstack([COLOUR, GRAY])
LOSSLESS = encoded(COLOUR, ".webp", cv2.IMWRITE_WEBP_QUALITY, 101)
JP2 = encoded(COLOUR, ".jp2")
SIX = tiff("<", (0x0112, 3, 6))  # an EXIF block of a camera that was turned

WEBP, TIFF, BMP, GIF = ImageFlag.WEBP, ImageFlag.TIFF, ImageFlag.BMP, ImageFlag.GIF
JPEG_2000, NETPBM, AVIF, SUN = ImageFlag.JPEG_2000, ImageFlag.NETPBM, ImageFlag.AVIF, ImageFlag.SUN_RASTER
SEVERAL = ImageFlag.SEVERAL


def info(components: int, flags: ImageFlag, orientation: int = 1) -> ImageInfo:
    return ImageInfo(45, 34, components, flags, orientation)


KINDS: dict[str, tuple[bytes, ImageInfo]] = {
    "lossless.webp": (LOSSLESS, info(3, WEBP)),
    "lossy.webp": (encoded(COLOUR, ".webp", cv2.IMWRITE_WEBP_QUALITY, 80), info(3, WEBP)),
    "alpha.webp": (encoded(ALPHA, ".webp"), info(4, WEBP)),
    "turned.webp": (extended_webp(chunk_of_riff(b"EXIF", SIX)), info(3, WEBP, 6)),
    "animated.webp": (animation(".webp"), info(3, WEBP | SEVERAL)),
    "lzw.tif": (encoded(COLOUR, ".tiff"), info(3, TIFF)),
    "deflate.tiff": (encoded(COLOUR, ".tiff", cv2.IMWRITE_TIFF_COMPRESSION, 8), info(3, TIFF)),
    "jpeg.tiff": (encoded(COLOUR, ".tiff", cv2.IMWRITE_TIFF_COMPRESSION, 7), info(3, TIFF)),
    "gray.tiff": (encoded(GRAY, ".tiff"), info(1, TIFF)),
    "alpha.tiff": (encoded(ALPHA, ".tiff"), info(4, TIFF)),
    "deep.tiff": (encoded(GRAY.astype(np.uint16) * 257, ".tiff"), info(1, TIFF)),
    "deep-colour.tiff": (encoded(COLOUR.astype(np.uint16) * 257, ".tiff"), info(3, TIFF)),
    "raw.tiff": (raw_tiff(), info(1, TIFF)),
    "motorola.tiff": (raw_tiff(">"), info(1, TIFF)),
    "big.tiff": (raw_tiff(big=True), info(1, TIFF)),
    "big-motorola.tiff": (raw_tiff(">", big=True), info(1, TIFF)),
    "inverted.tiff": (raw_tiff(**{"262": 0}), info(1, TIFF)),
    "turned.tiff": (raw_tiff(**{"274": 6}), ImageInfo(34, 45, 1, TIFF)),
    "pages.tiff": (cv2.imencodemulti(".tiff", [COLOUR, COLOUR + 9])[1].tobytes(), info(3, TIFF | SEVERAL)),
    "colour.bmp": (encoded(COLOUR, ".bmp"), info(3, BMP)),
    "gray.bmp": (encoded(GRAY, ".bmp"), info(1, BMP)),
    "alpha.bmp": (encoded(ALPHA, ".bmp"), info(4, BMP)),
    "palette.bmp": (bmp(8, palette=bytes(range(8))), ImageInfo(5, 4, 3, BMP)),
    "bits.bmp": (bmp(1, palette=bytes(4) + b"\xff\xff\xff\0"), ImageInfo(5, 4, 1, BMP)),
    "packed.bmp": (bmp(8, bytes([5, 1, 0, 0] * 4 + [0, 1]), packing=1, palette=bytes(8)), ImageInfo(5, 4, 1, BMP)),
    "colour.gif": (encoded(COLOUR, ".gif"), info(3, GIF)),
    "animated.gif": (animation(".gif"), info(3, GIF | SEVERAL)),
    "colour.jp2": (JP2, info(3, JPEG_2000)),
    "gray.jp2": (encoded(GRAY, ".jp2"), info(1, JPEG_2000)),
    "deep.jp2": (encoded(GRAY.astype(np.uint16) * 257, ".jp2"), info(1, JPEG_2000)),
    "bare.j2k": (codestream(JP2), info(3, JPEG_2000)),
    "colour.ppm": (encoded(COLOUR, ".ppm"), info(3, NETPBM)),
    "deep.ppm": (encoded(COLOUR.astype(np.uint16) * 257, ".ppm"), info(3, NETPBM)),
    "gray.pgm": (encoded(GRAY, ".pgm"), info(1, NETPBM)),
    "bits.pbm": (encoded(GRAY // 200 * 255, ".pbm"), info(1, NETPBM)),
    "plain.pbm": (b"P1\n# bits\n3 2\n101\n010\n", ImageInfo(3, 2, 1, NETPBM)),
    "plain.pgm": (b"P2 3 2 255\n1 2 3\n4 5 66\n", ImageInfo(3, 2, 1, NETPBM)),
    "plain.ppm": (b"P3\n1 2\n# colours\n255\n1 2 3 4 5 66\n", ImageInfo(1, 2, 3, NETPBM)),
    "colour.avif": (encoded(COLOUR, ".avif"), info(3, AVIF)),
    "gray.avif": (encoded(GRAY, ".avif"), info(1, AVIF)),
    "alpha.avif": (encoded(ALPHA, ".avif"), info(4, AVIF)),
    "deep.avif": (encoded(COLOUR.astype(np.uint16) * 4, ".avif", cv2.IMWRITE_AVIF_DEPTH, 10), info(3, AVIF)),
    "animated.avif": (animation(".avif"), info(3, AVIF | SEVERAL)),
    "colour.ras": (encoded(COLOUR, ".ras"), info(3, SUN)),
    "gray.sr": (encoded(GRAY, ".sr"), info(1, SUN)),
}  # fmt: skip
"""The files of each kind by name, and what their headers say."""
