"""Reads image files other than JPEG and PNG: WebP, GIF, BMP, Netpbm, Sun raster, TIFF, AVIF and JPEG 2000.

Properties are read and parts must lie within the file; nothing is decoded. Files that OpenCV would decode to
wrong pixels are refused.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import BadImage
from shardprep.formats.images.info import CONVERT_IT, MAX_PIXELS, ImageFlag, ImageInfo
from shardprep.formats.images.kinds import exif_orientation

MAX_PARTS = 1 << 16  # side by side in a file; photographs have dozens, an animation one per frame
NONE = ImageFlag(0)


def numbers(form: str, image: bytes, at: int, kind: str) -> tuple[Any, ...]:
    """Unpack numbers at an offset by a :mod:`struct` format. Raises BadImage beyond the end of the image."""
    if at + struct.calcsize(form) > len(image):
        raise truncated(kind)
    return struct.unpack_from(form, image, at)


def truncated(kind: str) -> BadImage:
    return BadImage(f"truncated: the {kind} has no end")


def too_many_parts(kind: str) -> BadImage:
    return BadImage(f"{kind} of more than {MAX_PARTS} parts")


def not_decoded(what: str) -> BadImage:
    """Return the error for an image that OpenCV refuses."""
    return BadImage(f"{what}, which OpenCV does not decode{CONVERT_IT}")


def decoded_wrongly(what: str) -> BadImage:
    """Return the error for an image that OpenCV decodes to wrong pixels."""
    return BadImage(f"{what}, which OpenCV decodes to wrong pixels{CONVERT_IT}")


def _trailing(end: int, image: bytes) -> ImageFlag:
    return ImageFlag.TRAILING_BYTES if end < len(image) else NONE


GIF_SIGNATURES = (b"GIF87a", b"GIF89a")
MAX_BLOCKS = 1 << 20  # including the sub-blocks of up to 255 bytes that hold the data
_IMAGE, _EXTENSION, _TRAILER = 0x2C, 0x21, 0x3B


def read_gif(image: bytes) -> ImageInfo:
    """Return the properties of a GIF. Raises BadImage unless it has an image and an end."""
    width, height, packed = numbers("<HHB", image, 6, "GIF")
    at, images, is_within_data = 13 + _colours(packed), 0, False
    for _ in range(MAX_BLOCKS):
        if at >= len(image):
            raise truncated("GIF")
        kind = image[at]
        at += 1
        if is_within_data:  # sub-blocks, each after its length, up to an empty one
            at += kind
            is_within_data = kind > 0
        elif kind == _TRAILER:
            break
        elif kind == _IMAGE:
            images += 1
            x, y, own_width, own_height, packed = numbers("<HHHHB", image, at, "GIF")
            if not own_width or not own_height or x + own_width > width or y + own_height > height:
                raise BadImage("a GIF with an image that does not fit its screen")
            at += 9 + _colours(packed) + 1
            is_within_data = True
        elif kind == _EXTENSION:
            at += 1
            is_within_data = True
        else:
            raise BadImage(f"a GIF with an unknown block at byte {at - 1}")
    else:
        raise BadImage(f"a GIF of more than {MAX_BLOCKS} blocks")
    if not images:
        raise BadImage("a GIF without an image")
    several = ImageFlag.SEVERAL if images > 1 else NONE
    return ImageInfo(width, height, 3, ImageFlag.GIF | several | _trailing(at, image))


def _colours(packed: int) -> int:
    """Return the size in bytes of the colour table that a packed field declares."""
    return 3 << (packed & 7) + 1 if packed & 0x80 else 0


WEBP_SIGNATURE = b"RIFF"
_HAS_ANIMATION, _HAS_ALPHA = 0x02, 0x10
_STILL = (b"VP8 ", b"VP8L")


def read_webp(image: bytes) -> ImageInfo:
    """Return the properties of a WebP. Raises BadImage unless its chunks fit, and it has an image."""
    if image[8:12] != b"WEBP":
        raise BadImage(f"not an image (a RIFF file of the kind {image[8:12].decode('latin-1')!r})")
    end = 8 + numbers("<I", image, 4, "WebP")[0]
    flags = ImageFlag.WEBP | _trailing(end, image)
    chunks = _webp_chunks(image, end)
    kind, start, _ = next(chunks)
    if kind in _STILL:
        size, has_alpha = _bitstream(image, kind, start)
        return ImageInfo(*size, 4 if has_alpha else 3, flags)
    if kind != b"VP8X":
        raise BadImage(f"a WebP that begins with the chunk {kind.decode('latin-1')!r}")
    features, low_width, high_width, low_height, high_height = numbers("<B3xHBHB", image, start, "WebP")
    canvas = 1 + low_width + (high_width << 16), 1 + low_height + (high_height << 16)
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


def _webp_chunks(image: bytes, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield kind, start and stop of each chunk's data. Raises BadImage if one does not fit."""
    if end > len(image) or end < 20:
        raise truncated("WebP")
    at = 12
    for _ in range(MAX_PARTS):
        if at >= end:
            return
        kind, length = numbers("<4sI", image, at, "WebP")
        if at + 8 + length > end:
            raise BadImage(f"a WebP chunk at byte {at} does not fit")
        yield kind, at + 8, at + 8 + length
        at += 8 + length + length % 2
    raise too_many_parts("a WebP")


def _bitstream(image: bytes, kind: bytes, start: int) -> tuple[tuple[int, int], bool]:
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


BMP_SIGNATURE = b"BM"

_CORE = 12  # bytes of the oldest header, with sizes of 16 bits
_PLAIN, _RLE8, _RLE4, _MASKS = range(4)
_DEPTHS = {_PLAIN: (1, 4, 8, 16, 24, 32), _RLE8: (8,), _RLE4: (4,), _MASKS: (16, 32)}
_USUAL_MASKS = {16: ((0x7C00, 0x03E0, 0x001F), (0xF800, 0x07E0, 0x001F)), 32: ((0xFF0000, 0xFF00, 0xFF),)}


def read_bmp(image: bytes) -> ImageInfo:
    """Return the properties of a BMP. Raises BadImage unless it is complete and can be decoded."""
    size, start, header = numbers("<I4xII", image, 2, "BMP")
    packed = colours = 0
    if header == _CORE:
        width, height, depth = numbers("<HH2xH", image, 18, "BMP")
        packing = _PLAIN
    elif header < 36:
        raise BadImage(f"a BMP with a header of {header} bytes")
    else:
        width, height, depth, packing, packed, colours = numbers("<ii2xHII8xI", image, 18, "BMP")
    if depth not in _DEPTHS.get(packing, ()):
        raise not_decoded(f"a BMP of {depth} bits with compression {packing}")
    if packing == _MASKS and numbers("<3I", image, 54, "BMP") not in _USUAL_MASKS[depth]:
        raise decoded_wrongly("a BMP of unusual colour masks")
    if width < 0:
        raise BadImage("a BMP with a negative width")
    is_packed = packing in (_RLE8, _RLE4)
    end = start + (packed if is_packed else (width * depth + 31) // 32 * 4 * abs(height))
    if end > len(image):
        raise truncated("BMP")
    components = 4 if depth == 32 and packing == _MASKS else 3
    if depth <= 8:
        step, most = 3 if header == _CORE else 4, 1 << depth
        entries = min(colours or most, most)
        palette = np.frombuffer(image[14 + header : 14 + header + step * entries], np.uint8)
        if len(palette) < step * entries:
            raise truncated("BMP")
        shades = palette.reshape(-1, step)[:, :3]
        components = 1 if (shades == shades[:, :1]).all() else 3
    flags = ImageFlag.BMP | _trailing(max(end, size), image)
    return ImageInfo(width, abs(height), components, flags)


NETPBM_SIGNATURES = tuple(f"P{form}{blank}".encode() for form in range(1, 7) for blank in " \t\r\n#")
_NUMBER = re.compile(rb"(?:\s|#[^\r\n]*+[\r\n])*+(\d{1,9})(?=[\s#])")  # after blanks and comments
_COMPONENTS = {1: 1, 2: 1, 3: 3, 4: 1, 5: 1, 6: 3}
_BITMAPS = (1, 4)


def read_netpbm(image: bytes) -> ImageInfo:
    """Return the properties of a PBM, PGM or PPM. Raises BadImage unless it has all its samples."""
    form = image[1] - ord("0")
    found, at = [], 2
    for _ in range(2 if form in _BITMAPS else 3):
        number = _NUMBER.match(image, at)
        if number is None:
            raise BadImage("a Netpbm file without the numbers of its header")
        found.append(int(number[1]))
        at = number.end()
    width, height, *largest = found
    if largest not in ([], [255], [65535]):
        raise decoded_wrongly(f"a Netpbm file with values up to {largest[0]}")
    flags, components = ImageFlag.NETPBM, _COMPONENTS[form]
    if form <= 3:
        is_complete = _samples(image[at:], is_bitmap=form == 1) >= width * height * components
    else:
        row = (width + 7) // 8 if form == 4 else width * components * (1 if largest == [255] else 2)
        end = at + 1 + row * height
        is_complete = end <= len(image)
        flags |= _trailing(end, image)
    if not is_complete:
        raise truncated("Netpbm file")
    return ImageInfo(width, height, components, flags)


def _samples(text: bytes, *, is_bitmap: bool) -> int:
    """Return the number of samples in the text of a plain file: digits of a bitmap, otherwise numbers."""
    codes = np.frombuffer(text, np.uint8)
    is_digit = (codes >= ord("0")) & (codes <= ord("9"))
    if is_bitmap:
        return int(np.count_nonzero(is_digit))
    return int(np.count_nonzero(is_digit[1:] & ~is_digit[:-1])) + int(is_digit[:1].any())


SUN_RASTER_SIGNATURE = b"\x59\xa6\x6a\x95"
_PACKED = 2
_SUN_RASTER_COMPONENTS = {1: 1, 8: 1, 24: 3, 32: 3}


def read_sun_raster(image: bytes) -> ImageInfo:
    """Return the properties of a Sun raster. Raises BadImage unless it is complete and can be decoded."""
    width, height, depth, length, form, _, map_bytes = numbers(">7I", image, 4, "Sun raster")
    if depth not in _SUN_RASTER_COMPONENTS or form > _PACKED:
        raise not_decoded(f"a Sun raster of {depth} bits and type {form}")
    end = 32 + map_bytes + (length if form == _PACKED else (width * depth + 15) // 16 * 2 * height)
    if end > len(image):
        raise truncated("Sun raster")
    flags = ImageFlag.SUN_RASTER | _trailing(end, image)
    return ImageInfo(width, height, 3 if map_bytes else _SUN_RASTER_COMPONENTS[depth], flags)


def _boxes(image: bytes, kind: str, start: int, stop: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield the name of each box between two offsets of a file, and the start and stop of its content.

    ``kind`` names the file in errors. Raises BadImage for a box that does not fit, or more than MAX_PARTS.
    """
    for _ in range(MAX_PARTS):
        if start == stop:
            return
        size, name = numbers(">I4s", image, start, kind)
        inside = start + 8
        if size == 1:
            (size,) = numbers(">Q", image, inside, kind)
            inside += 8
        end = stop if size == 0 else start + size
        if end < inside:
            raise BadImage(f"{kind} with a box at byte {start} that is too short")
        if end > stop:
            raise truncated(kind)
        yield name, inside, end
        start = end
    raise too_many_parts(kind)


AVIF_BRANDS = frozenset([b"avif", b"avis"])
HEIC_BRANDS = frozenset([b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"])
_ALPHA = b"urn:mpeg:mpegB:cicp:systems:auxiliary:alpha"
_EXTENT = re.compile(rb"ispe\0{4}(.{4})(.{4})", re.DOTALL)
_CODING = re.compile(rb"av1C..(.)", re.DOTALL)
_MONOCHROME = 0x10  # in the third byte of av1C


def is_base_media(image: bytes | bytearray | memoryview) -> bool:
    """Whether the bytes begin like an MP4, HEIC or AVIF file."""
    return bytes(image[4:8]) == b"ftyp"


def read_avif(image: bytes) -> ImageInfo:
    """Return the properties of an AVIF. Raises BadImage unless its boxes fit, and its image has a size.

    Of all images in the file the largest counts; others may be tiles, alpha or a thumbnail. OpenCV ignores
    rotation and mirroring in the image's properties, so neither is recorded.
    """
    top = list(_boxes(image, "AVIF", 0, len(image)))
    brands = {image[8:12], *(image[at : at + 4] for at in range(16, min(top[0][2], 1024), 4))}
    if not brands & AVIF_BRANDS:
        if brands & HEIC_BRANDS:
            raise not_decoded("HEIC")
        raise BadImage(f"not an image (a file of the kind {image[8:12].decode('latin-1')!r})")
    meta = b"".join(image[start:stop] for name, start, stop in top if name == b"meta")
    if b"mdat" not in {name for name, *_ in top} and b"idat" not in meta:
        raise truncated("AVIF")
    sizes = [tuple(int.from_bytes(side, "big") for side in found) for found in _EXTENT.findall(meta)]
    if not sizes:
        raise BadImage("an AVIF without the size of its image")
    width, height = max(sizes, key=lambda sides: sides[0] * sides[1])
    codings = _CODING.findall(meta)
    is_gray = bool(codings) and all(third[0] & _MONOCHROME for third in codings)
    flags = ImageFlag.AVIF | (ImageFlag.SEVERAL if image[8:12] == b"avis" else NONE)
    return ImageInfo(width, height, (1 if is_gray else 3) + (_ALPHA in meta), flags)


FILE = b"\0\0\0\x0cjP  \r\n\x87\n"
CODESTREAM = b"\xff\x4f\xff\x51"
JPEG2000_SIGNATURES = (FILE, CODESTREAM)
MAX_TILES = 65_535
_SRGB, _GRAY = 16, 17


def read_jpeg2000(image: bytes) -> ImageInfo:
    """Return the properties of a JPEG 2000. Raises BadImage unless it has an end and can be decoded."""
    start, stop = 0, len(image)
    if image.startswith(FILE):
        start, stop = _codestream(image)
    if image[start : start + 4] != CODESTREAM:
        raise BadImage("a JPEG 2000 without the size of its image")
    right, bottom, left, top, *tiles, components = numbers(">8IH", image, start + 8, "JPEG 2000")
    if right <= left or bottom <= top:
        raise BadImage("a JPEG 2000 without pixels")
    tile_width, tile_height, tile_left, tile_top = tiles
    if not tile_width or not tile_height or tile_left > right or tile_top > bottom:
        raise BadImage("a JPEG 2000 with tiles that do not fit")
    if -(-(right - tile_left) // tile_width) * -(-(bottom - tile_top) // tile_height) > MAX_TILES:
        raise BadImage(f"a JPEG 2000 of more than {MAX_TILES} tiles")
    if not 1 <= components <= 4:
        raise not_decoded(f"a JPEG 2000 of {components} components")
    parts = numbers(f"{3 * components}B", image, start + 42, "JPEG 2000")
    if any(depth not in (7, 15) for depth in parts[::3]):
        raise not_decoded("a JPEG 2000 with samples that do not have 8 or 16 bits")
    if any(step != 1 for at, step in enumerate(parts) if at % 3):
        raise not_decoded("a JPEG 2000 with subsampled components")
    end = image.rfind(b"\xff\xd9", start, stop)
    if end < 0:
        raise truncated("JPEG 2000")
    is_last = end + 2 == len(image) or stop < len(image)
    flags = ImageFlag.JPEG_2000 | (NONE if is_last else ImageFlag.TRAILING_BYTES)
    return ImageInfo(right - left, bottom - top, components, flags)


def _codestream(image: bytes) -> tuple[int, int]:
    """Return the codestream's bounds. Raises BadImage for colours other than sRGB, gray or an ICC profile."""
    header: tuple[int, int] | None = None
    for name, start, stop in _boxes(image, "JPEG 2000", 0, len(image)):
        if name == b"jp2h":
            header = start, stop
        elif name == b"jp2c":
            break
    else:
        raise BadImage("a JPEG 2000 without a codestream")
    if header is None:
        raise BadImage("a JPEG 2000 without its header")
    colours = b""
    for name, begin, end in _boxes(image, "JPEG 2000", *header):
        if name == b"pclr":
            raise decoded_wrongly("a JPEG 2000 with a palette")
        if name == b"colr" and not colours:
            colours = image[begin:end]
    if colours[:1] in (b"", b"\1") and int.from_bytes(colours[3:7], "big") not in (_SRGB, _GRAY):
        raise decoded_wrongly("a JPEG 2000 with colours that are not sRGB or gray")
    return start, stop


TIFF_SIGNATURES = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
MAX_ENTRIES = 1 << 18  # of all directories together

_TYPE_BYTES = dict(
    zip((*range(1, 14), 16, 17, 18), (1, 1, 2, 4, 8, 1, 1, 2, 4, 8, 4, 8, 4, 8, 8, 8), strict=True)
)
_UNSIGNED = {1: "u1", 3: "u2", 4: "u4", 13: "u4", 16: "u8"}
_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC, _ORIENTATION = 256, 257, 258, 259, 262, 274
_SAMPLES, _PLANAR, _SAMPLE_FORMAT = 277, 284, 339
_STRIPS, _TILES, _TILE_WIDTH, _TILE_HEIGHT = (273, 279), (324, 325), 322, 323

# Of OpenCV's wheels, which are built without LZMA, Zstandard and WebP.
_COMPRESSIONS = frozenset([1, 2, 3, 4, 5, 7, 8, 32773, 32946])
_GRAY_INVERTED, _TIFF_GRAY, _RGB, _PALETTE, _CMYK, _YCBCR = 0, 1, 2, 3, 5, 6
_DECODED: dict[int, dict[int, tuple[int, ...]]] = {
    1: {_GRAY_INVERTED: (1,), _TIFF_GRAY: (1,), _PALETTE: (1,)},
    4: {_PALETTE: (1,)},
    8: {_GRAY_INVERTED: (1, 2), _TIFF_GRAY: (1, 2), _RGB: (3, 4), _PALETTE: (1,), _CMYK: (4,), _YCBCR: (3,)},
    16: {_GRAY_INVERTED: (1,), _TIFF_GRAY: (1,), _RGB: (3, 4)},
}
"""The supported numbers of samples, by bits and photometric interpretation."""


def read_tiff(image: bytes) -> ImageInfo:
    """Return the properties of a TIFF's first page. Raises BadImage unless all pages are complete.

    OpenCV always applies a TIFF's orientation, so the size is the rotated image's, and none is recorded.
    """
    order = "<" if image[:2] == b"II" else ">"
    count_form, entry_form, pointer, at = order + "H", order + "HHI", order + "I", 4
    if b"*" not in image[2:4]:
        if numbers(order + "HH", image, 4, "TIFF") != (8, 0):
            raise BadImage("a BigTIFF without pointers of 8 bytes")
        count_form, entry_form, pointer, at = order + "Q", order + "HHQ", order + "Q", 8
    pages: dict[int, _Page] = {}
    entries = 0
    (at,) = numbers(pointer, image, at, "TIFF")
    while at or not pages:
        (count,) = numbers(count_form, image, at, "TIFF")
        entries += 1 + count
        if entries > MAX_ENTRIES:
            raise BadImage(f"a TIFF of more than {MAX_ENTRIES} entries")
        if at in pages:
            raise BadImage("a TIFF of pages in a circle")
        page = pages[at] = _Page(image, order)
        at += struct.calcsize(count_form)
        for _ in range(count):
            at = page.add_entry(at, entry_form, pointer)
        page.check_pixels()
        (at,) = numbers(pointer, image, at, "TIFF")
    first = next(iter(pages.values()))
    width, height = first.one(_WIDTH), first.one(_HEIGHT)
    if 5 <= first.one(_ORIENTATION, 1) <= 8:
        width, height = height, width
    flags = ImageFlag.TIFF | (ImageFlag.SEVERAL if len(pages) > 1 else NONE)
    return ImageInfo(width, height, first.checked_components(), flags)


class _Page:
    """A page's directory: the type, the number and the offset of each tag's values."""

    def __init__(self, image: bytes, order: str) -> None:
        self._image, self._order = image, order
        self._entries: dict[int, tuple[int, int, int]] = {}

    def add_entry(self, at: int, form: str, pointer: str) -> int:
        """Add the entry at an offset, and return its end. Raises BadImage for values beyond the file."""
        tag, kind, count = numbers(form, self._image, at, "TIFF")
        inline = at + struct.calcsize(form)
        (start,) = numbers(pointer, self._image, inline, "TIFF")
        size = _TYPE_BYTES.get(kind, 0) * count
        if size <= struct.calcsize(pointer):
            start = inline
        if start + size > len(self._image):
            raise truncated("TIFF")
        self._entries.setdefault(tag, (kind, count, start))
        return inline + struct.calcsize(pointer)

    def all(self, tag: int) -> npt.NDArray[np.uint64]:
        """Return a tag's unsigned integers; none without the tag."""
        if tag not in self._entries:
            return np.zeros(0, np.uint64)
        kind, count, start = self._entries[tag]
        if kind not in _UNSIGNED:
            raise BadImage(f"a TIFF with tag {tag} of type {kind}")
        dtype: np.dtype[Any] = np.dtype(self._order + _UNSIGNED[kind])
        return np.frombuffer(self._image, dtype, count, start).astype(np.uint64)

    def one(self, tag: int, default: int | None = None) -> int:
        """Return the value of a tag; if it has several, all must be equal."""
        values = np.unique(self.all(tag)).tolist()
        if not values and default is not None:
            return default
        if len(values) != 1:
            raise BadImage(f"a TIFF with {len(values)} values of tag {tag}")
        return int(values[0])

    def check_pixels(self) -> None:
        """Raise BadImage unless the page has strips or tiles, all within the file."""
        end = len(self._image)
        starts, sizes = map(self.all, _TILES if _TILES[0] in self._entries else _STRIPS)
        if not len(starts) or (len(sizes) and len(sizes) != len(starts)):
            raise BadImage("a TIFF without the places of its pixels")
        ends = starts + sizes if len(sizes) else starts
        if (starts > end).any() or (sizes > end).any() or (ends > end).any():
            raise truncated("TIFF")
        if self.one(_TILE_WIDTH, 0) * self.one(_TILE_HEIGHT, 0) > MAX_PIXELS:
            raise BadImage(f"too large: a TIFF with tiles of more than {MAX_PIXELS} pixels")

    def checked_components(self) -> int:
        """Return the number of components. Raises BadImage unless OpenCV decodes the page correctly."""
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
        if bits == 16 and (is_planar or (samples == 1 and _TILES[0] in self._entries)):
            raise decoded_wrongly("a TIFF of 16 bits in planes or gray tiles")
        return 3 if photometric == _PALETTE else samples
