"""Files of Netpbm (PBM, PGM and PPM, plain or raw): their properties and their completeness."""

from __future__ import annotations

import re

import numpy as np

from shardprep.formats.errors import BadImage

from .image_info import ImageFlag, ImageInfo, decoded_wrongly, truncated

SIGNATURES = tuple(f"P{form}{blank}".encode() for form in range(1, 7) for blank in " \t\r\n#")
_NUMBER = re.compile(rb"(?:\s|#[^\r\n]*+[\r\n])*+(\d{1,9})(?=[\s#])")  # after blanks and comments
_COMPONENTS = {1: 1, 2: 1, 3: 3, 4: 1, 5: 1, 6: 3}
_BITMAPS = (1, 4)


def read_netpbm(image: bytes) -> ImageInfo:
    """Return the properties of a PBM, PGM or PPM. Raises BadImage unless it has all its samples.

    OpenCV does not scale samples by their largest value, so this must be 255 or 65535.
    """
    form = image[1] - ord("0")
    start, width, height, *rest = _header(image, 2 if form in _BITMAPS else 3)
    largest = rest[0] if rest else 1
    if rest and largest not in (255, 65535):
        raise decoded_wrongly(f"a file of Netpbm with values up to {largest}")
    flags, components = ImageFlag.NETPBM, _COMPONENTS[form]
    if form <= 3:
        is_complete = _samples(image[start:], is_bitmap=form == 1) >= width * height * components
    else:
        row = (width + 7) // 8 if form == 4 else width * components * (1 if largest == 255 else 2)
        end = start + 1 + row * height
        is_complete = end <= len(image)
        flags |= ImageFlag.TRAILING_BYTES if end < len(image) else ImageFlag(0)
    if not is_complete:
        raise truncated("file of Netpbm")
    return ImageInfo(width, height, components, flags)


def _header(image: bytes, count: int) -> list[int]:
    """Return the place after the header, and the numbers in it."""
    found, at = [], 2
    for _ in range(count):
        number = _NUMBER.match(image, at)
        if number is None:
            raise BadImage("a file of Netpbm without the numbers of its header")
        found.append(int(number[1]))
        at = number.end()
    return [at, *found]


def _samples(text: bytes, *, is_bitmap: bool) -> int:
    """Return the number of samples in the text of a plain file: of digits in a bitmap, else of numbers."""
    codes = np.frombuffer(text, np.uint8)
    is_digit = (codes >= ord("0")) & (codes <= ord("9"))
    if is_bitmap:
        return int(np.count_nonzero(is_digit))
    return int(np.count_nonzero(is_digit[1:] & ~is_digit[:-1])) + int(is_digit[:1].any())
