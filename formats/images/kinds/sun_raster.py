"""A Sun raster file by its header: its properties and its completeness."""

from __future__ import annotations

from .image_info import ImageFlag, ImageInfo, not_decoded, numbers, truncated

SIGNATURE = b"\x59\xa6\x6a\x95"
_HEADER = 32
_PACKED = 2
_COMPONENTS = {1: 1, 8: 1, 24: 3, 32: 3}


def read_sun_raster(image: bytes) -> ImageInfo:
    """Return the properties of a Sun raster. Raises BadImage unless it is complete and can be decoded."""
    width, height, depth, length, form, _, map_bytes = numbers(">7I", image, 4, "Sun raster")
    if depth not in _COMPONENTS or form > _PACKED:
        raise not_decoded(f"a Sun raster of {depth} bits and type {form}")
    size = length if form == _PACKED else (width * depth + 15) // 16 * 2 * height
    end = _HEADER + map_bytes + size
    if end > len(image):
        raise truncated("Sun raster")
    flags = ImageFlag.SUN_RASTER | (ImageFlag.TRAILING_BYTES if end < len(image) else ImageFlag(0))
    return ImageInfo(width, height, 3 if map_bytes else _COMPONENTS[depth], flags)
