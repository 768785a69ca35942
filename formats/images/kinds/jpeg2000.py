"""A JPEG 2000, as a JP2 file or as its bare codestream: its properties and its completeness."""

from __future__ import annotations

from shardprep.formats.errors import BadImage

from .boxes import FileBox, boxes_in, content
from .image_info import ImageFlag, ImageInfo, decoded_wrongly, not_decoded, numbers, truncated

FILE = b"\0\0\0\x0cjP  \r\n\x87\n"
CODESTREAM = b"\xff\x4f\xff\x51"
SIGNATURES = (FILE, CODESTREAM)
MAX_TILES = 65_535
_NAME = "JPEG 2000"
_SRGB, _GRAY = 16, 17
_END = b"\xff\xd9"


def read_jpeg2000(image: bytes) -> ImageInfo:
    """Return the properties of a JPEG 2000. Raises BadImage unless it has an end and can be decoded."""
    start, stop = 0, len(image)
    if image.startswith(FILE):
        boxes = _until_codestream(image)
        _check_colours(image, boxes)
        _, start, stop = boxes[b"jp2c"]
    width, height, components = _size(image, start)
    end = image.rfind(_END, start, stop)
    if end < 0:
        raise truncated(_NAME)
    is_last = end + len(_END) == len(image) or stop < len(image)
    flags = ImageFlag.JPEG_2000 | (ImageFlag(0) if is_last else ImageFlag.TRAILING_BYTES)
    return ImageInfo(width, height, components, flags)


def _until_codestream(image: bytes) -> dict[bytes, FileBox]:
    """Return the boxes up to that of the codestream, by kind."""
    boxes: dict[bytes, FileBox] = {}
    for box in boxes_in(image, 0, len(image), _NAME):
        boxes[box.kind] = box
        if box.kind == b"jp2c":
            return boxes
    raise BadImage("a JPEG 2000 without a codestream")


def _check_colours(image: bytes, boxes: dict[bytes, FileBox]) -> None:
    """Raise BadImage for colours that are not sRGB, gray, or described by an ICC profile."""
    if b"jp2h" not in boxes:
        raise BadImage("a JPEG 2000 without its header")
    _, start, stop = boxes[b"jp2h"]
    inner: dict[bytes, FileBox] = {}
    for box in boxes_in(image, start, stop, _NAME):
        inner.setdefault(box.kind, box)
    if b"pclr" in inner:
        raise decoded_wrongly("a JPEG 2000 with a palette")
    colours = content(image, inner, b"colr", _NAME)
    if colours[:1] == b"\1" and int.from_bytes(colours[3:7], "big") not in (_SRGB, _GRAY):
        raise decoded_wrongly("a JPEG 2000 with colours that are not sRGB or gray")


def _size(image: bytes, start: int) -> tuple[int, int, int]:
    """Return width, height and the number of components in the codestream's SIZ marker."""
    if image[start : start + 4] != CODESTREAM:
        raise BadImage("a JPEG 2000 without the size of its image")
    right, bottom, left, top, *tiles, components = numbers(">8IH", image, start + 8, _NAME)
    if right <= left or bottom <= top:
        raise BadImage("a JPEG 2000 without pixels")
    _check_tiles(right, bottom, *tiles)
    if not 1 <= components <= 4:
        raise not_decoded(f"a JPEG 2000 of {components} components")
    parts = numbers(f"{3 * components}B", image, start + 42, _NAME)
    if any(depth not in (7, 15) for depth in parts[::3]):
        raise not_decoded("a JPEG 2000 with samples that do not have 8 or 16 bits")
    if any(step != 1 for at, step in enumerate(parts) if at % 3):
        raise not_decoded("a JPEG 2000 with subsampled components")
    return right - left, bottom - top, components


def _check_tiles(right: int, bottom: int, width: int, height: int, left: int, top: int) -> None:
    if not width or not height or left > right or top > bottom:
        raise BadImage("a JPEG 2000 with tiles that do not fit")
    if -(-(right - left) // width) * -(-(bottom - top) // height) > MAX_TILES:
        raise BadImage(f"a JPEG 2000 of more than {MAX_TILES} tiles")
