"""A WebP by its chunks (RFC 9649): its properties and its completeness."""

from __future__ import annotations

from collections.abc import Iterator

from shardprep.formats.errors import BadImage

from .image_info import ImageFlag, ImageInfo, numbers, truncated
from .tiff import exif_orientation

SIGNATURE = b"RIFF"
MAX_CHUNKS = 1 << 16  # an animation has one per frame
_HAS_ANIMATION, _HAS_ALPHA = 0x02, 0x10
_STILL = (b"VP8 ", b"VP8L")
Size = tuple[int, int]


def read_webp(image: bytes) -> ImageInfo:
    """Return the properties of a WebP. Raises BadImage unless its chunks fit, and it has an image."""
    if image[8:12] != b"WEBP":
        raise BadImage(f"not an image (a RIFF file of the kind {image[8:12].decode('latin-1')!r})")
    end = 8 + numbers("<I", image, 4, "WebP")[0]
    flags = ImageFlag.WEBP | (ImageFlag.TRAILING_BYTES if end < len(image) else ImageFlag(0))
    chunks = _chunks(image, end)
    kind, start, _ = next(chunks)
    if kind in _STILL:
        size, has_alpha = _bitstream(image, kind, start)
        return ImageInfo(*size, 4 if has_alpha else 3, flags)
    if kind != b"VP8X":
        raise BadImage(f"a WebP that begins with the chunk {kind.decode('latin-1')!r}")
    canvas, features = _extended(image, start)
    orientation: int | None = 1
    has_image = False
    for kind, start, stop in chunks:
        has_image |= kind == b"ANMF"
        if kind in _STILL and not features & _HAS_ANIMATION:
            has_image = True
            if _bitstream(image, kind, start)[0] != canvas:
                raise BadImage("a WebP with an image of another size than its canvas")
        elif kind == b"EXIF":
            orientation = exif_orientation(image[start:stop])
    if not has_image:
        raise BadImage("a WebP without an image")
    if orientation is None:
        flags |= ImageFlag.CORRUPT_EXIF
    if features & _HAS_ANIMATION:
        flags |= ImageFlag.SEVERAL
    return ImageInfo(*canvas, 4 if features & _HAS_ALPHA else 3, flags, orientation or 1)


def _chunks(image: bytes, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield kind, start and stop of each chunk's data. Raises BadImage if one does not fit."""
    if end > len(image) or end < 20:
        raise truncated("WebP")
    at = 12
    for _ in range(MAX_CHUNKS):
        if at >= end:
            return
        kind, length = numbers("<4sI", image, at, "WebP")
        if at + 8 + length > end:
            raise BadImage(f"a WebP chunk at byte {at} does not fit")
        yield kind, at + 8, at + 8 + length
        at += 8 + length + length % 2
    raise BadImage(f"a WebP of more than {MAX_CHUNKS} chunks")


def _extended(image: bytes, start: int) -> tuple[Size, int]:
    """Return the size of the canvas, and the features of the file as bits."""
    features, low_width, high_width, low_height, high_height = numbers("<B3xHBHB", image, start, "WebP")
    return (1 + low_width + (high_width << 16), 1 + low_height + (high_height << 16)), features


def _bitstream(image: bytes, kind: bytes, start: int) -> tuple[Size, bool]:
    """Return the size of a still image, and whether it has alpha."""
    if kind == b"VP8L":
        signature, bits = numbers("<BI", image, start, "WebP")
        if signature != 0x2F:
            raise BadImage("a WebP without the signature of its lossless image")
        return (1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)), bool(bits >> 28 & 1)
    tag, code, width, height = numbers("<B2x3sHH", image, start, "WebP")
    if tag & 1 or code != b"\x9d\x01\x2a":
        raise BadImage("a WebP without the key frame of its image")
    return (width & 0x3FFF, height & 0x3FFF), False
