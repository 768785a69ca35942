"""Kinds of image files made of boxes or directories: AVIF, JPEG 2000 and TIFF.

Each is read for its properties and its completeness; nothing is decoded.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import BadImage
from shardprep.formats.images.info import (
    MAX_PIXELS,
    ImageFlag,
    ImageInfo,
    decoded_wrongly,
    not_decoded,
    numbers,
    truncated,
)

MAX_BOXES = 10_000  # side by side; photographs have some dozens


class FileBox(NamedTuple):
    """A box: its kind, and where its content starts and stops."""

    kind: bytes
    start: int
    stop: int


def boxes_in(image: bytes, start: int, stop: int, of: str) -> Iterator[FileBox]:
    """Yield the boxes between two places, side by side; ``of`` is the kind of file for errors.

    Raises BadImage at a box that does not fit, or after MAX_BOXES.
    """
    for _ in range(MAX_BOXES):
        if start == stop:
            return
        box = _box_at(image, start, stop, of)
        if box.stop > stop:
            raise truncated(of)
        yield box
        start = box.stop
    raise BadImage(f"{of} of more than {MAX_BOXES} boxes")


def _box_at(image: bytes, at: int, stop: int, of: str) -> FileBox:
    size, kind = numbers(">I4s", image, at, of)
    start = at + 8
    if size == 1:
        (size,) = numbers(">Q", image, start, of)
        start += 8
    end = stop if size == 0 else at + size
    if end < start:
        raise BadImage(f"{of} with a box at byte {at} that is too short")
    return FileBox(kind, start, end)


def content(image: bytes, boxes: dict[bytes, FileBox], kind: bytes, of: str) -> bytes:
    """Return the content of a box that must be there. Raises BadImage."""
    box = boxes.get(kind)
    if box is None:
        raise BadImage(f"{of} without the box {kind.decode()!r}")
    return image[box.start : box.stop]


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


FILE = b"\0\0\0\x0cjP  \r\n\x87\n"
CODESTREAM = b"\xff\x4f\xff\x51"
JPEG2000_SIGNATURES = (FILE, CODESTREAM)
MAX_TILES = 65_535
_JPEG2000_NAME = "JPEG 2000"
_SRGB, _GRAY = 16, 17
_END = b"\xff\xd9"


def read_jpeg2000(image: bytes) -> ImageInfo:
    """Return the properties of a JPEG 2000. Raises BadImage unless it has an end and can be decoded."""
    start, stop = 0, len(image)
    if image.startswith(FILE):
        boxes = _until_codestream(image)
        _check_colours(image, boxes)
        _, start, stop = boxes[b"jp2c"]
    width, height, components = _jpeg2000_size(image, start)
    end = image.rfind(_END, start, stop)
    if end < 0:
        raise truncated(_JPEG2000_NAME)
    is_last = end + len(_END) == len(image) or stop < len(image)
    flags = ImageFlag.JPEG_2000 | (ImageFlag(0) if is_last else ImageFlag.TRAILING_BYTES)
    return ImageInfo(width, height, components, flags)


def _until_codestream(image: bytes) -> dict[bytes, FileBox]:
    """Return the boxes up to that of the codestream, by kind."""
    boxes: dict[bytes, FileBox] = {}
    for box in boxes_in(image, 0, len(image), _JPEG2000_NAME):
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
    for box in boxes_in(image, start, stop, _JPEG2000_NAME):
        inner.setdefault(box.kind, box)
    if b"pclr" in inner:
        raise decoded_wrongly("a JPEG 2000 with a palette")
    colours = content(image, inner, b"colr", _JPEG2000_NAME)
    if colours[:1] == b"\1" and int.from_bytes(colours[3:7], "big") not in (_SRGB, _GRAY):
        raise decoded_wrongly("a JPEG 2000 with colours that are not sRGB or gray")


def _jpeg2000_size(image: bytes, start: int) -> tuple[int, int, int]:
    """Return width, height and the number of components in the codestream's SIZ marker."""
    if image[start : start + 4] != CODESTREAM:
        raise BadImage("a JPEG 2000 without the size of its image")
    right, bottom, left, top, *tiles, components = numbers(">8IH", image, start + 8, _JPEG2000_NAME)
    if right <= left or bottom <= top:
        raise BadImage("a JPEG 2000 without pixels")
    _check_tiles(right, bottom, *tiles)
    if not 1 <= components <= 4:
        raise not_decoded(f"a JPEG 2000 of {components} components")
    parts = numbers(f"{3 * components}B", image, start + 42, _JPEG2000_NAME)
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


TIFF_SIGNATURES = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
MAX_ENTRIES = 1 << 18  # of all directories together

_TYPE_BYTES = {
    1: 1,
    2: 1,
    3: 2,
    4: 4,
    5: 8,
    6: 1,
    7: 1,
    8: 2,
    9: 4,
    10: 8,
    11: 4,
    12: 8,
    13: 4,
    16: 8,
    17: 8,
    18: 8,
}
_UNSIGNED = {1: "u1", 3: "u2", 4: "u4", 13: "u4", 16: "u8"}
_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC, _ORIENTATION = 256, 257, 258, 259, 262, 274
_SAMPLES, _PLANAR, _SAMPLE_FORMAT = 277, 284, 339
_STRIPS, _TILES, _TILE_WIDTH, _TILE_HEIGHT = (273, 279), (324, 325), 322, 323

# As the wheels of OpenCV are built; LZMA, Zstandard and WebP are left out there.
_COMPRESSIONS = frozenset([1, 2, 3, 4, 5, 7, 8, 32773, 32946])
_GRAY_INVERTED, _TIFF_GRAY, _RGB, _PALETTE, _CMYK, _YCBCR = 0, 1, 2, 3, 5, 6
_DECODED: dict[int, dict[int, tuple[int, ...]]] = {
    1: {_GRAY_INVERTED: (1,), _TIFF_GRAY: (1,), _PALETTE: (1,)},
    4: {_PALETTE: (1,)},
    8: {_GRAY_INVERTED: (1, 2), _TIFF_GRAY: (1, 2), _RGB: (3, 4), _PALETTE: (1,), _CMYK: (4,), _YCBCR: (3,)},
    16: {_GRAY_INVERTED: (1,), _TIFF_GRAY: (1,), _RGB: (3, 4)},
}
"""The numbers of samples that are decoded, by bits and photometric interpretation."""


class _Form(NamedTuple):
    """The byte order, and the formats of a number of entries, of an entry's head and of a pointer."""

    order: str
    number: str
    head: str
    pointer: str


@dataclass(frozen=True, slots=True)
class _Entry:
    """An entry of a directory: the type of its values, their number and the place of the first."""

    kind: int
    count: int
    at: int


_Directory = dict[int, _Entry]


def read_tiff(image: bytes) -> ImageInfo:
    """Return the properties of a TIFF's first page. Raises BadImage unless all pages are complete.

    OpenCV always applies a TIFF's orientation, so the size is that of the turned image, and none is recorded.
    """
    form, first = _begin(image)
    pages = _pages(image, form, first)
    for page in pages:
        _check_pixels(image, form, page)
    values = _Values(image, form, pages[0])
    width, height = values.one(_WIDTH), values.one(_HEIGHT)
    components = _check_decoded(values, pages[0])
    if 5 <= values.one(_ORIENTATION, 1) <= 8:
        width, height = height, width
    return ImageInfo(
        width, height, components, ImageFlag.TIFF | (ImageFlag.SEVERAL if pages[1:] else ImageFlag(0))
    )


def _begin(image: bytes) -> tuple[_Form, int]:
    """Return the form, and the place of the first directory."""
    order = "<" if image[:2] == b"II" else ">"
    if b"*" in image[2:4]:
        return _Form(order, "H", "HHI", "I"), numbers(order + "I", image, 4, "TIFF")[0]
    if numbers(order + "HH", image, 4, "TIFF") != (8, 0):
        raise BadImage("a BigTIFF with pointers that are not of 8 bytes")
    return _Form(order, "Q", "HHQ", "Q"), numbers(order + "Q", image, 8, "TIFF")[0]


def _pages(image: bytes, form: _Form, at: int) -> list[_Directory]:
    """Return the directories of all pages, at least one. Raises BadImage for more than MAX_ENTRIES."""
    pages: dict[int, _Directory] = {}
    left = MAX_ENTRIES
    while at or not pages:
        (count,) = numbers(form.order + form.number, image, at, "TIFF")
        left -= 1 + count
        if left < 0:
            raise BadImage(f"a TIFF of more than {MAX_ENTRIES} entries")
        if at in pages:
            raise BadImage("a TIFF of pages in a circle")
        entries = at + struct.calcsize(form.number)
        pages[at] = _directory(image, form, entries, count)
        (at,) = numbers(form.order + form.pointer, image, entries + count * _entry_bytes(form), "TIFF")
    return [*pages.values()]


def _entry_bytes(form: _Form) -> int:
    return struct.calcsize(form.order + form.head + form.pointer)


def _directory(image: bytes, form: _Form, at: int, count: int) -> _Directory:
    """Return a directory's entries by tag. Raises BadImage if values lie after the end of the file."""
    found: _Directory = {}
    pointer_bytes = struct.calcsize(form.pointer)
    for place in range(at, at + count * _entry_bytes(form), _entry_bytes(form)):
        tag, kind, values, pointer = numbers(form.order + form.head + form.pointer, image, place, "TIFF")
        size = _TYPE_BYTES.get(kind, 0) * values
        inline = place + _entry_bytes(form) - pointer_bytes
        start = inline if size <= pointer_bytes else pointer
        if start + size > len(image):
            raise truncated("TIFF")
        found.setdefault(tag, _Entry(kind, values, start))
    return found


@dataclass(frozen=True, slots=True)
class _Values:
    """The values of a directory's entries."""

    image: bytes
    form: _Form
    directory: _Directory

    def all(self, tag: int) -> npt.NDArray[np.uint64]:
        """Return a tag's values, which are unsigned integers; none if it is not there."""
        entry = self.directory.get(tag)
        if entry is None:
            return np.zeros(0, np.uint64)
        if entry.kind not in _UNSIGNED:
            raise BadImage(f"a TIFF with tag {tag} of type {entry.kind}")
        kind = np.dtype(self.form.order + _UNSIGNED[entry.kind])
        return np.frombuffer(self.image, kind, entry.count, entry.at).astype(np.uint64)

    def one(self, tag: int, default: int | None = None) -> int:
        """Return the value of a tag, which must be the same for all samples if it has several."""
        values = np.unique(self.all(tag)).tolist()
        if not values and default is not None:
            return default
        if len(values) != 1:
            raise BadImage(f"a TIFF with {len(values)} values of tag {tag}")
        return int(values[0])


def _check_pixels(image: bytes, form: _Form, page: _Directory) -> None:
    """Raise BadImage unless the page has strips or tiles, all within the file."""
    values = _Values(image, form, page)
    starts, sizes = map(values.all, _TILES if _TILES[0] in page else _STRIPS)
    if not len(starts) or (len(sizes) and len(sizes) != len(starts)):
        raise BadImage("a TIFF without the places of its pixels")
    ends = starts + sizes if len(sizes) else starts
    if (starts > len(image)).any() or (sizes > len(image)).any() or (ends > len(image)).any():
        raise truncated("TIFF")
    if values.one(_TILE_WIDTH, 0) * values.one(_TILE_HEIGHT, 0) > MAX_PIXELS:
        raise BadImage(f"too large: a TIFF with tiles of more than {MAX_PIXELS} pixels")


def _check_decoded(values: _Values, page: _Directory) -> int:
    """Return the number of components, for a page that OpenCV decodes to its pixels. Raises BadImage."""
    bits, samples = values.one(_BITS, 1), values.one(_SAMPLES, 1)
    photometric, compression = values.one(_PHOTOMETRIC), values.one(_COMPRESSION, 1)
    if compression not in _COMPRESSIONS:
        raise not_decoded(f"a TIFF with compression {compression}")
    if values.one(_SAMPLE_FORMAT, 1) != 1 or samples not in _DECODED.get(bits, {}).get(photometric, ()):
        raise not_decoded(
            f"a TIFF of {samples} samples of {bits} bits, of format {values.one(_SAMPLE_FORMAT, 1)} and "
            f"interpretation {photometric}"
        )
    is_planar = samples > 1 and values.one(_PLANAR, 1) != 1
    if bits == 16 and (is_planar or (samples == 1 and _TILES[0] in page)):
        raise decoded_wrongly("a TIFF of 16 bits in planes or gray tiles")
    return 3 if photometric == _PALETTE else samples


def exif_orientation(tiff: bytes) -> int | None:
    """Return the orientation (1 to 8) in an EXIF block, 1 if it has none, None if the block is corrupt."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    try:
        if order is None:
            return None
        (at,) = struct.unpack_from(order + "I", tiff, 4)
        (count,) = struct.unpack_from(order + "H", tiff, at)
        for entry in range(at + 2, at + 2 + 12 * count, 12):
            tag, kind, _, value = struct.unpack_from(order + "HHIH", tiff, entry)
            if tag == 0x0112:
                return value if kind == 3 and 1 <= value <= 8 else None
    except struct.error:
        return None
    return 1
