"""Kinds of image files made of boxes or directories: AVIF, JPEG 2000 and TIFF.

Each is read for its properties and its completeness; nothing is decoded.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True, slots=True)
class _Boxes:
    """The boxes side by side between two places of a file, such as the inside of a box.

    ``of`` is the kind of the file for errors. A box that does not fit, and more than MAX_BOXES, are BadImage.
    """

    image: bytes
    of: str
    start: int
    stop: int

    def __iter__(self) -> Iterator[tuple[bytes, _Boxes]]:
        """Yield the kind of each box, and its inside."""
        at = self.start
        for _ in range(MAX_BOXES):
            if at == self.stop:
                return
            size, kind = numbers(">I4s", self.image, at, self.of)
            start = at + 8
            if size == 1:
                (size,) = numbers(">Q", self.image, start, self.of)
                start += 8
            end = self.stop if size == 0 else at + size
            if end < start:
                raise BadImage(f"{self.of} with a box at byte {at} that is too short")
            if end > self.stop:
                raise truncated(self.of)
            yield kind, _Boxes(self.image, self.of, start, end)
            at = end
        raise BadImage(f"{self.of} of more than {MAX_BOXES} boxes")

    @property
    def content(self) -> bytes:
        return self.image[self.start : self.stop]

    def first(self, kind: bytes, missing: str = "") -> _Boxes:
        """Return the inside of the first box of a kind. Raises BadImage with what is missing."""
        found = self.by_kind().get(kind)
        if found is None:
            raise BadImage(missing or f"{self.of} without the box {kind.decode()!r}")
        return found

    def by_kind(self) -> dict[bytes, _Boxes]:
        """Return the inside of the first box of each kind."""
        found: dict[bytes, _Boxes] = {}
        for kind, inside in self:
            found.setdefault(kind, inside)
        return found


AVIF_BRANDS = frozenset([b"avif", b"avis"])
HEIC_BRANDS = frozenset([b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"])
MAX_ITEMS = 1 << 16
_NAME = "AVIF"
_NO_SIZE = "an AVIF without the size of its image"
_MONOCHROME = 0x10  # in the third byte of av1C


def is_base_media(image: bytes | bytearray | memoryview) -> bool:
    """Whether the bytes begin as the files of MP4, HEIC and AVIF do."""
    return bytes(image[4:8]) == b"ftyp"


def read_avif(image: bytes) -> ImageInfo:
    """Return the properties of an AVIF. Raises BadImage unless its boxes fit, and its image has a size.

    A rotation or a mirroring in its properties is not applied by OpenCV, so it is not recorded.
    """
    top = _Boxes(image, _NAME, 0, len(image))
    _, named = next(iter(top))
    brands = {image[8:12], *(image[at : at + 4] for at in range(16, min(named.stop, 1024), 4))}
    if not brands & AVIF_BRANDS:
        if brands & HEIC_BRANDS:
            raise not_decoded("HEIC")
        raise BadImage(f"not an image (a file of the kind {image[8:12].decode('latin-1')!r})")
    described = top.first(b"meta", "an AVIF without the description of its image")
    meta = _Boxes(image, _NAME, described.start + 4, described.stop)
    if b"mdat" not in top.by_kind() and b"idat" not in meta.by_kind():
        raise truncated(_NAME)
    properties = list(_primary_properties(meta))
    extent = next((inside for kind, inside in properties if kind == b"ispe"), None)
    if extent is None:
        raise BadImage(_NO_SIZE)
    width, height = numbers(">II", extent.content, 4, _NAME)
    has_alpha = b"urn:mpeg:mpegB:cicp:systems:auxiliary:alpha" in described.content
    flags = ImageFlag.AVIF | (ImageFlag.SEVERAL if image[8:12] == b"avis" else ImageFlag(0))
    return ImageInfo(width, height, _colours(properties) + has_alpha, flags)


def _primary_properties(meta: _Boxes) -> Iterator[tuple[bytes, _Boxes]]:
    """Yield the kinds and the insides of the primary image's properties."""
    no_properties = "an AVIF without properties"
    described = meta.first(b"iprp", no_properties)
    known = list(described.first(b"ipco", no_properties))
    associations = described.first(b"ipma").content
    pitm = meta.first(b"pitm").content
    (primary,) = numbers(">I" if pitm[:1] != b"\0" else ">H", pitm, 4, _NAME)
    for number in _associated(associations, primary):
        if 0 < number <= len(known):
            yield known[number - 1]


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
    raise BadImage(_NO_SIZE)


def _colours(properties: list[tuple[bytes, _Boxes]]) -> int:
    """Return the number of channels without alpha."""
    for kind, inside in properties:
        if kind == b"av1C":
            return 1 if numbers("B", inside.content, 2, _NAME)[0] & _MONOCHROME else 3
        if kind == b"pixi":
            return 1 if numbers("B", inside.content, 4, _NAME)[0] == 1 else 3
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
    stream = _Boxes(image, _JPEG2000_NAME, 0, len(image))
    if image.startswith(FILE):
        stream = _codestream(stream)
    width, height, components = _jpeg2000_size(image, stream.start)
    end = image.rfind(_END, stream.start, stream.stop)
    if end < 0:
        raise truncated(_JPEG2000_NAME)
    is_last = end + len(_END) == len(image) or stream.stop < len(image)
    flags = ImageFlag.JPEG_2000 | (ImageFlag(0) if is_last else ImageFlag.TRAILING_BYTES)
    return ImageInfo(width, height, components, flags)


def _codestream(file: _Boxes) -> _Boxes:
    """Return the codestream's box. Raises BadImage for colours other than sRGB, gray, or an ICC profile."""
    header = None
    for kind, inside in file:
        if kind == b"jp2h":
            header = inside
        elif kind == b"jp2c":
            break
    else:
        raise BadImage("a JPEG 2000 without a codestream")
    if header is None:
        raise BadImage("a JPEG 2000 without its header")
    if b"pclr" in header.by_kind():
        raise decoded_wrongly("a JPEG 2000 with a palette")
    colours = header.first(b"colr").content
    if colours[:1] == b"\1" and int.from_bytes(colours[3:7], "big") not in (_SRGB, _GRAY):
        raise decoded_wrongly("a JPEG 2000 with colours that are not sRGB or gray")
    return inside


def _jpeg2000_size(image: bytes, start: int) -> tuple[int, int, int]:
    """Return width, height and the number of components in the codestream's SIZ marker."""
    if image[start : start + 4] != CODESTREAM:
        raise BadImage("a JPEG 2000 without the size of its image")
    right, bottom, left, top, *tiles, components = numbers(">8IH", image, start + 8, _JPEG2000_NAME)
    if right <= left or bottom <= top:
        raise BadImage("a JPEG 2000 without pixels")
    tile_width, tile_height, tile_left, tile_top = tiles
    if not tile_width or not tile_height or tile_left > right or tile_top > bottom:
        raise BadImage("a JPEG 2000 with tiles that do not fit")
    if -(-(right - tile_left) // tile_width) * -(-(bottom - tile_top) // tile_height) > MAX_TILES:
        raise BadImage(f"a JPEG 2000 of more than {MAX_TILES} tiles")
    if not 1 <= components <= 4:
        raise not_decoded(f"a JPEG 2000 of {components} components")
    parts = numbers(f"{3 * components}B", image, start + 42, _JPEG2000_NAME)
    if any(depth not in (7, 15) for depth in parts[::3]):
        raise not_decoded("a JPEG 2000 with samples that do not have 8 or 16 bits")
    if any(step != 1 for at, step in enumerate(parts) if at % 3):
        raise not_decoded("a JPEG 2000 with subsampled components")
    return right - left, bottom - top, components


TIFF_SIGNATURES = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
MAX_ENTRIES = 1 << 18  # of all directories together

_TYPES = (*range(1, 14), 16, 17, 18)
_TYPE_BYTES = dict(zip(_TYPES, (1, 1, 2, 4, 8, 1, 1, 2, 4, 8, 4, 8, 4, 8, 8, 8), strict=True))
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


def read_tiff(image: bytes) -> ImageInfo:
    """Return the properties of a TIFF's first page. Raises BadImage unless all pages are complete.

    OpenCV always applies a TIFF's orientation, so the size is that of the turned image, and none is recorded.
    """
    pages = _pages(image)
    for page in pages:
        page.check_pixels()
    first = pages[0]
    width, height = first.one(_WIDTH), first.one(_HEIGHT)
    components = first.checked_components()
    if 5 <= first.one(_ORIENTATION, 1) <= 8:
        width, height = height, width
    return ImageInfo(
        width, height, components, ImageFlag.TIFF | (ImageFlag.SEVERAL if pages[1:] else ImageFlag(0))
    )


def _pages(image: bytes) -> list[_Page]:
    """Return all pages, at least one. Raises BadImage for more than MAX_ENTRIES."""
    order = "<" if image[:2] == b"II" else ">"
    count_layout, entry_layout, pointer = order + "H", order + "HHI", order + "I"
    first = 4
    if b"*" not in image[2:4]:
        if numbers(order + "HH", image, 4, "TIFF") != (8, 0):
            raise BadImage("a BigTIFF with pointers that are not of 8 bytes")
        count_layout, entry_layout, pointer, first = order + "Q", order + "HHQ", order + "Q", 8
    pages: dict[int, _Page] = {}
    left = MAX_ENTRIES
    (at,) = numbers(pointer, image, first, "TIFF")
    while at or not pages:
        (count,) = numbers(count_layout, image, at, "TIFF")
        left -= 1 + count
        if left < 0:
            raise BadImage(f"a TIFF of more than {MAX_ENTRIES} entries")
        if at in pages:
            raise BadImage("a TIFF of pages in a circle")
        page = pages[at] = _Page(image, order, {})
        at += struct.calcsize(count_layout)
        for _ in range(count):
            at = page.add_entry(at, entry_layout, pointer)
        (at,) = numbers(pointer, image, at, "TIFF")
    return [*pages.values()]


@dataclass(frozen=True, slots=True)
class _Page:
    """A page by its directory: the type of each tag's values, their number and where the first one is."""

    image: bytes
    order: str
    entries: dict[int, tuple[int, int, int]]

    def add_entry(self, at: int, layout: str, pointer: str) -> int:
        """Add the entry at a place, and return its end. Raises BadImage for values after the file's end."""
        tag, kind, count = numbers(layout, self.image, at, "TIFF")
        inline = at + struct.calcsize(layout)
        (start,) = numbers(pointer, self.image, inline, "TIFF")
        size = _TYPE_BYTES.get(kind, 0) * count
        if size <= struct.calcsize(pointer):
            start = inline
        if start + size > len(self.image):
            raise truncated("TIFF")
        self.entries.setdefault(tag, (kind, count, start))
        return inline + struct.calcsize(pointer)

    def all(self, tag: int) -> npt.NDArray[np.uint64]:
        """Return a tag's values, which are unsigned integers; none if it is not there."""
        if tag not in self.entries:
            return np.zeros(0, np.uint64)
        kind, count, start = self.entries[tag]
        if kind not in _UNSIGNED:
            raise BadImage(f"a TIFF with tag {tag} of type {kind}")
        dtype: np.dtype[Any] = np.dtype(self.order + _UNSIGNED[kind])
        return np.frombuffer(self.image, dtype, count, start).astype(np.uint64)

    def one(self, tag: int, default: int | None = None) -> int:
        """Return the value of a tag, which must be the same for all samples if it has several."""
        values = np.unique(self.all(tag)).tolist()
        if not values and default is not None:
            return default
        if len(values) != 1:
            raise BadImage(f"a TIFF with {len(values)} values of tag {tag}")
        return int(values[0])

    def check_pixels(self) -> None:
        """Raise BadImage unless the page has strips or tiles, all within the file."""
        end = len(self.image)
        starts, sizes = map(self.all, _TILES if _TILES[0] in self.entries else _STRIPS)
        if not len(starts) or (len(sizes) and len(sizes) != len(starts)):
            raise BadImage("a TIFF without the places of its pixels")
        ends = starts + sizes if len(sizes) else starts
        if (starts > end).any() or (sizes > end).any() or (ends > end).any():
            raise truncated("TIFF")
        if self.one(_TILE_WIDTH, 0) * self.one(_TILE_HEIGHT, 0) > MAX_PIXELS:
            raise BadImage(f"too large: a TIFF with tiles of more than {MAX_PIXELS} pixels")

    def checked_components(self) -> int:
        """Return the number of components. Raises BadImage if OpenCV does not decode the page as it is."""
        bits, samples, form = self.one(_BITS, 1), self.one(_SAMPLES, 1), self.one(_SAMPLE_FORMAT, 1)
        photometric, compression = self.one(_PHOTOMETRIC), self.one(_COMPRESSION, 1)
        if compression not in _COMPRESSIONS:
            raise not_decoded(f"a TIFF with compression {compression}")
        if form != 1 or samples not in _DECODED.get(bits, {}).get(photometric, ()):
            raise not_decoded(
                f"a TIFF of {samples} samples of {bits} bits, of format {form} and "
                f"interpretation {photometric}"
            )
        is_planar = samples > 1 and self.one(_PLANAR, 1) != 1
        if bits == 16 and (is_planar or (samples == 1 and _TILES[0] in self.entries)):
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
