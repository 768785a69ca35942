"""A TIFF or BigTIFF by its directories: its properties and its completeness. An EXIF block is a TIFF, too."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import BadImage

from .image_info import (
    MAX_PIXELS,
    ImageFlag,
    ImageInfo,
    decoded_wrongly,
    not_decoded,
    numbers,
    truncated,
)

SIGNATURES = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
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
_GRAY_INVERTED, _GRAY, _RGB, _PALETTE, _CMYK, _YCBCR = 0, 1, 2, 3, 5, 6
_DECODED: dict[int, dict[int, tuple[int, ...]]] = {
    1: {_GRAY_INVERTED: (1,), _GRAY: (1,), _PALETTE: (1,)},
    4: {_PALETTE: (1,)},
    8: {_GRAY_INVERTED: (1, 2), _GRAY: (1, 2), _RGB: (3, 4), _PALETTE: (1,), _CMYK: (4,), _YCBCR: (3,)},
    16: {_GRAY_INVERTED: (1,), _GRAY: (1,), _RGB: (3, 4)},
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
