"""An AVIF by its boxes: its properties and its completeness. HEIC files, which share the boxes, are named."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from shardprep.formats.errors import BadImage

from .boxes import FileBox, boxes_in, content
from .image_info import ImageFlag, ImageInfo, not_decoded, numbers, truncated

AVIF_BRANDS = frozenset([b"avif", b"avis"])
HEIC_BRANDS = frozenset([b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"])
MAX_ITEMS = 1 << 16
_NAME = "AVIF"
_MONOCHROME = 0x10  # in the third byte of av1C


def is_base_media(image: bytes | bytearray | memoryview) -> bool:
    """Whether the bytes begin as the files of MP4, HEIC and AVIF do."""
    return bytes(image[4:8]) == b"ftyp"


class Property(NamedTuple):
    """A property of an item: its kind and its content."""

    kind: bytes
    content: bytes


def read_avif(image: bytes) -> ImageInfo:
    """Return the properties of an AVIF. Raises BadImage unless its boxes fit, and its image has a size.

    A rotation or a mirroring in its properties is not applied by OpenCV, so it is not recorded.
    """
    brands = _brands(image)
    if not brands & AVIF_BRANDS:
        if brands & HEIC_BRANDS:
            raise not_decoded("HEIC")
        raise BadImage(f"not an image (a file of the kind {image[8:12].decode('latin-1')!r})")
    top = _by_kind(boxes_in(image, 0, len(image), _NAME))
    if b"meta" not in top:
        raise BadImage("an AVIF without the description of its image")
    _, start, stop = top[b"meta"]
    meta = _by_kind(boxes_in(image, start + 4, stop, _NAME))
    if b"mdat" not in top and b"idat" not in meta:
        raise truncated(_NAME)
    properties = list(_primary_properties(image, meta))
    width, height = _size(properties)
    has_alpha = b"urn:mpeg:mpegB:cicp:systems:auxiliary:alpha" in image[start:stop]
    flags = ImageFlag.AVIF | (ImageFlag.SEVERAL if image[8:12] == b"avis" else ImageFlag(0))
    return ImageInfo(width, height, _colours(properties) + has_alpha, flags)


def _brands(image: bytes) -> set[bytes]:
    box = next(boxes_in(image, 0, len(image), _NAME))
    return {image[8:12], *(image[at : at + 4] for at in range(16, min(box.stop, 1024), 4))}


def _by_kind(boxes: Iterator[FileBox]) -> dict[bytes, FileBox]:
    found: dict[bytes, FileBox] = {}
    for box in boxes:
        found.setdefault(box.kind, box)
    return found


def _primary_properties(image: bytes, meta: dict[bytes, FileBox]) -> Iterator[Property]:
    """Yield the properties of the primary image."""
    if b"iprp" not in meta:
        raise BadImage("an AVIF without properties")
    _, start, stop = meta[b"iprp"]
    described = _by_kind(boxes_in(image, start, stop, _NAME))
    if b"ipco" not in described:
        raise BadImage("an AVIF without properties")
    _, start, stop = described[b"ipco"]
    known = [Property(box.kind, image[box.start : box.stop]) for box in boxes_in(image, start, stop, _NAME)]
    for number in _associated(content(image, described, b"ipma", _NAME), _primary(image, meta)):
        if 0 < number <= len(known):
            yield known[number - 1]


def _primary(image: bytes, meta: dict[bytes, FileBox]) -> int:
    """Return the number of the primary item."""
    pitm = content(image, meta, b"pitm", _NAME)
    return int(numbers(">I" if pitm[:1] != b"\0" else ">H", pitm, 4, _NAME)[0])


def _associated(ipma: bytes, item: int) -> list[int]:
    """Return the numbers of an item's properties."""
    version, flags, count = numbers(">B2xBI", ipma, 0, _NAME)
    at = 8
    for _ in range(min(count, MAX_ITEMS)):
        found, associations = numbers(">IB" if version else ">HB", ipma, at, _NAME)
        at += 5 if version else 3
        listed = numbers(f">{associations}{'H' if flags & 1 else 'B'}", ipma, at, _NAME)
        if found == item:
            return [number & (0x7FFF if flags & 1 else 0x7F) for number in listed]
        at += associations * (2 if flags & 1 else 1)
    raise BadImage("an AVIF without the size of its image")


def _size(properties: list[Property]) -> tuple[int, int]:
    for kind, extent in properties:
        if kind == b"ispe":
            width, height = numbers(">II", extent, 4, _NAME)
            return width, height
    raise BadImage("an AVIF without the size of its image")


def _colours(properties: list[Property]) -> int:
    """Return the number of channels without alpha."""
    for kind, configuration in properties:
        if kind == b"av1C":
            return 1 if numbers("B", configuration, 2, _NAME)[0] & _MONOCHROME else 3
        if kind == b"pixi":
            return 1 if numbers("B", configuration, 4, _NAME)[0] == 1 else 3
    return 3
