"""A BMP by its header: its properties and its completeness."""

from __future__ import annotations

import struct

from shardprep.formats.errors import BadImage

from .image_info import ImageFlag, ImageInfo, decoded_wrongly, not_decoded, numbers, truncated

SIGNATURE = b"BM"

_CORE = 12  # bytes of the oldest header, with sizes of 16 bits
_PLAIN, _RLE8, _RLE4, _MASKS = range(4)
_DEPTHS = {_PLAIN: (1, 4, 8, 16, 24, 32), _RLE8: (8,), _RLE4: (4,), _MASKS: (16, 32)}
_USUAL_MASKS = {
    16: ((0x7C00, 0x03E0, 0x001F), (0xF800, 0x07E0, 0x001F)),
    32: ((0xFF0000, 0xFF00, 0xFF),),
}


def read_bmp(image: bytes) -> ImageInfo:
    """Return the properties of a BMP. Raises BadImage unless it is complete and can be decoded."""
    start, header = numbers("<II", image, 10, "BMP")
    width, height, depth, packing = _layout(image, header)
    if depth not in _DEPTHS.get(packing, ()):
        raise not_decoded(f"a BMP of {depth} bits with compression {packing}")
    if packing == _MASKS and numbers("<3I", image, 54, "BMP") not in _USUAL_MASKS[depth]:
        raise decoded_wrongly("a BMP of unusual colour masks")
    if width < 0:
        raise BadImage("a BMP with a negative width")
    size = _packed_size(image) if packing in (_RLE8, _RLE4) else (width * depth + 31) // 32 * 4 * abs(height)
    if start + size > len(image):
        raise truncated("BMP")
    end = max(start + size, numbers("<I", image, 2, "BMP")[0])
    trailing = ImageFlag.TRAILING_BYTES if end < len(image) else ImageFlag(0)
    is_gray = depth <= 8 and _has_gray_palette(image, header, depth)
    components = 1 if is_gray else 4 if depth == 32 and packing == _MASKS else 3
    return ImageInfo(width, abs(height), components, ImageFlag.BMP | trailing)


def _layout(image: bytes, header: int) -> tuple[int, int, int, int]:
    """Return width, height (negative if the rows begin at the top), bits per pixel and the compression."""
    if header == _CORE:
        width, height, _, depth = numbers("<HHHH", image, 18, "BMP")
        return width, height, depth, _PLAIN
    if header < 36:
        raise BadImage(f"a BMP with a header of {header} bytes")
    width, height, _, depth, packing = numbers("<iiHHI", image, 18, "BMP")
    return width, height, depth, packing


def _packed_size(image: bytes) -> int:
    return int(numbers("<I", image, 34, "BMP")[0])


def _has_gray_palette(image: bytes, header: int, depth: int) -> bool:
    step = 3 if header == _CORE else 4
    used = 0 if header == _CORE else numbers("<I", image, 46, "BMP")[0]
    colours = min(used or 1 << depth, 1 << depth)
    palette = image[14 + header : 14 + header + step * colours]
    if len(palette) < step * colours:
        raise truncated("BMP")
    return all(
        blue == green == red for blue, green, red in struct.iter_unpack("3B" + "x" * (step - 3), palette)
    )
