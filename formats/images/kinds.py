"""Image files made of a header or a row of segments: JPEG, PNG, GIF, WebP, BMP, Netpbm, Sun raster.

Each is read for its properties and its completeness; nothing is decoded.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator

import numpy as np

from shardprep.formats.errors import BadImage
from shardprep.formats.images.info import (
    ImageFlag,
    ImageInfo,
    decoded_wrongly,
    not_decoded,
    numbers,
    truncated,
)
from shardprep.formats.images.nested_kinds import exif_orientation

JPEG_SIGNATURE = b"\xff\xd8\xff"
MAX_MARKERS = 10_000  # before the first scan, with fill bytes; photographs have some dozens
MAX_SCANS = 100  # libjpeg decodes a progressive file once per scan: thousands are an attack

SOI, EOI, SOS, APP1, APP14 = 0xD8, 0xD9, 0xDA, 0xE1, 0xEE
STARTS_OF_FRAME = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # DHT, JPG and DAC lie among them
PROGRESSIVE_FRAMES = frozenset({0xC2, 0xC6, 0xCA, 0xCE})
STANDALONE = frozenset({0x01, *range(0xD0, 0xD8)})


def read_jpeg(image: bytes) -> ImageInfo:
    """Return the properties of a JPEG. Raises BadImage unless it has a frame, a scan and an end."""
    flags = ImageFlag(0)
    orientation = 1
    frame: tuple[int, int, int] | None = None
    for marker, start, stop in marker_segments(image):
        if marker in STARTS_OF_FRAME and frame is None:
            frame = _frame(image[start:stop])
            if marker in PROGRESSIVE_FRAMES:
                flags |= ImageFlag.PROGRESSIVE
        elif marker == APP14 and image[start : start + 5] == b"Adobe":
            flags |= ImageFlag.ADOBE
        elif marker == APP1 and image[start : start + 6] == b"Exif\0\0":
            found = exif_orientation(image[start + 6 : stop])
            orientation, flags = (found, flags) if found else (1, flags | ImageFlag.CORRUPT_EXIF)
        elif marker == SOS:
            if frame is None or start == stop:
                raise BadImage("a JPEG scan without a frame, or without components")
            several = bool(flags & ImageFlag.PROGRESSIVE) or image[start] < frame[2]
            flags |= _scans_end(image, stop, several=several)
    if frame is None:
        raise BadImage("a JPEG without a frame")
    height, width, components = frame
    return ImageInfo(width, height, components, flags, orientation)


def jpeg_size(image: bytes | bytearray | memoryview) -> tuple[int, int] | None:
    """Return width and height from a JPEG's first frame; None if there is none, or no size in it."""
    if image[: len(JPEG_SIGNATURE)] != JPEG_SIGNATURE:
        return None
    try:
        for marker, start, stop in marker_segments(image):
            if marker in STARTS_OF_FRAME:
                height, width, _ = _frame(image[start:stop])
                return (width, height) if width and height else None
    except BadImage:
        return None
    return None


def jpeg_orientation(image: bytes | bytearray | memoryview) -> int | None:
    """Return EXIF's orientation of a JPEG, 1 if there is none; None if it is corrupt, or for no JPEG."""
    orientation: int | None = 1
    if image[: len(JPEG_SIGNATURE)] != JPEG_SIGNATURE:
        return None
    try:
        for marker, start, stop in marker_segments(image):
            if marker == APP1 and image[start : start + 6] == b"Exif\0\0":
                orientation = exif_orientation(bytes(image[start + 6 : stop]))
    except BadImage:
        return None
    return orientation


def marker_segments(image: bytes | bytearray | memoryview) -> Iterator[tuple[int, int, int]]:
    """Yield (marker, start, stop) of each segment's payload, up to and including the first scan's header."""
    at = 2
    for _ in range(MAX_MARKERS):
        if at + 4 > len(image):
            raise BadImage("truncated: the JPEG ends before its first scan")
        if image[at] != 0xFF:
            raise BadImage(f"not a JPEG marker at byte {at}")
        marker = image[at + 1]
        if marker == 0xFF:  # fill byte
            at += 1
        elif marker in STANDALONE:
            at += 2
        elif marker in (SOI, EOI, 0x00):
            raise BadImage(f"JPEG marker {marker:#04x} at byte {at}, before any scan")
        else:
            stop = at + 2 + int.from_bytes(image[at + 2 : at + 4], "big")
            if stop < at + 4 or stop > len(image):
                raise BadImage(f"a JPEG segment at byte {at} does not fit")
            yield marker, at + 4, stop
            if marker == SOS:
                return
            at = stop
    raise BadImage(f"a JPEG of more than {MAX_MARKERS} markers before its first scan")


def _frame(payload: bytes | bytearray | memoryview) -> tuple[int, int, int]:
    """Return (height, width, components) of a start of frame."""
    if len(payload) < 6 or len(payload) < 6 + 3 * payload[5]:
        raise BadImage("a JPEG frame header that is too short")
    _, height, width, components = struct.unpack_from(">BHHB", payload)
    if components not in (1, 3, 4):
        raise BadImage(f"a JPEG of {components} components")
    return height, width, components


def _scans_end(image: bytes, start: int, *, several: bool) -> ImageFlag:
    """Check that the coded data from ``start`` has an end; within it 0x00 follows every 0xFF."""
    end = image.rfind(b"\xff\xd9", start)
    if end < 0:
        raise BadImage("truncated: the JPEG has no end")
    if several and image.count(b"\xff\xda", start) >= MAX_SCANS:
        raise BadImage(f"a JPEG of more than {MAX_SCANS} scans")
    return ImageFlag(0) if end + 2 == len(image) else ImageFlag.TRAILING_BYTES


ANIMATION = frozenset([b"acTL", b"fcTL", b"fdAT"])

_MOST = (1 << 31) - 1  # of any number in a PNG
_SIZES = {b"acTL": 8, b"fcTL": 26}  # an fdAT has a number of 4 bytes, and data
_FRAME = struct.Struct(">IIIIIHHBB")  # number, width, height, x, y, delay (2), disposal, blending


class Animation:
    """The check of an image's animation chunks in their order. Raises BadImage at the first that is wrong.

    It checks each chunk's length, that one acTL comes before all others and before the image, that numbers
    count up from 0, that frames are within the image (a first frame with the image for its data fills it),
    that each frame has data, and that there are as many frames as the acTL says.
    """

    def __init__(self, width: int, height: int) -> None:
        self._size = width, height
        self._frames: int | None = None
        self._seen = 0
        self._number = 0
        self._lacks_data = False

    def see(self, kind: bytes, data: bytes, *, has_image: bool) -> None:
        """Check the next chunk; ``has_image`` is whether an IDAT came before."""
        if len(data) != _SIZES.get(kind, len(data)) or len(data) < 4:
            raise BadImage(f"an animated PNG with {kind.decode()} of {len(data)} bytes")
        if (kind == b"acTL") is not (self._frames is None):
            raise BadImage(f"an animated PNG with {kind.decode()} out of order")
        if kind == b"acTL":
            self._begin(data, has_image)
            return
        if int.from_bytes(data[:4], "big") != self._number:
            raise BadImage("an animated PNG with chunks not numbered in order")
        self._number += 1
        if kind == b"fcTL":
            self._frame(data, has_image)
        elif not has_image or not self._seen or len(data) == 4:
            raise BadImage("an animated PNG with data of no frame, or none")
        else:
            self._lacks_data = False

    def _begin(self, data: bytes, has_image: bool) -> None:
        self._frames, plays = struct.unpack(">II", data)
        if has_image or not 1 <= self._frames <= _MOST or plays > _MOST:
            raise BadImage(
                f"an animated PNG of {self._frames} frames, played {plays} times, or declared late"
            )

    def _frame(self, data: bytes, has_image: bool) -> None:
        _, width, height, x, y, _, _, disposal, blending = _FRAME.unpack(data)
        inside = 0 < width <= self._size[0] - x and 0 < height <= self._size[1] - y
        fills = (width, height, x, y) == (*self._size, 0, 0)
        if not inside or disposal > 2 or blending > 1 or not (has_image or fills):
            raise BadImage("an animated PNG with a frame that does not fit")
        if self._lacks_data or (self._seen and not has_image):
            raise BadImage("an animated PNG with a frame without data")
        self._seen += 1
        self._lacks_data = has_image  # the data of a frame before the image is the image

    def end(self) -> None:
        """Check, at the end of the image, that the animation is complete."""
        if self._lacks_data or self._seen != (self._frames or 0):
            raise BadImage(f"an animated PNG of {self._seen} frames that says it has {self._frames}")


PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
PALETTE = 3  # a colour type
COMPONENTS = {0: 1, 2: 3, PALETTE: 3, 4: 2, 6: 4}  # by colour type; a palette expands to RGB

_CRITICAL = frozenset([b"IHDR", b"PLTE", b"IDAT", b"IEND"])
_HEAD = struct.Struct(">I4s")  # the length of a chunk's data, and its kind
_REST = _HEAD.size + 4  # with the CRC after the data


def read_png(image: bytes) -> ImageInfo:
    """Return the properties of a PNG. Raises BadImage unless its chunks are complete, known and in order.

    Unknown chunks are allowed if they are not critical. An animation must follow its specification; see
    :class:`Animation`.
    """
    width, height, colour, end = _walked(image)
    trailing = ImageFlag.TRAILING_BYTES if end != len(image) else ImageFlag(0)
    return ImageInfo(width, height, COMPONENTS[colour], ImageFlag.PNG | trailing)


def _walked(image: bytes) -> tuple[int, int, int, int]:
    """Return width, height, colour type and the end of the last chunk, after checking all chunks."""
    walk = _checked_chunks(image)
    _, data, end = next(walk)
    width, height, colour = _header(image, data)
    animation = Animation(width, height)
    seen, last = {b"IHDR"}, b"IHDR"
    for kind, data, stop in walk:
        _check_order(kind, seen, last, has_palette=colour == PALETTE)
        if kind in ANIMATION:
            animation.see(kind, image[data], has_image=b"IDAT" in seen)
        seen.add(kind)
        last, end = kind, stop
    animation.end()
    return width, height, colour, end


def without_animation(image: bytes) -> bytes:
    """Return the still image of an animated PNG, and any other PNG unchanged.

    OpenCV's decoder of animations writes out of bounds. Raises BadImage for an animated PNG that
    :func:`read_png` refuses.
    """
    if not _is_animated(image):
        return image
    *_, end = _walked(image)
    still = (image[start:stop] for kind, start, stop in _chunks(image[:end]) if kind not in ANIMATION)
    return PNG_SIGNATURE + b"".join(still)


def as_gray(image: bytes, *, key: str | None = None) -> tuple[bytes, int] | None:
    """Return a gray PNG of the samples of a gray or palette PNG, and the bits of a sample.

    The palette is left out, and all that is not needed to decode. None for a PNG of colours or with alpha.
    Raises BadImage, with ``key``, for a PNG that :func:`read_png` refuses.
    """
    try:
        _, _, colour, end = _walked(image)
    except BadImage as error:
        raise BadImage(error.message, key=key) from error
    if COMPONENTS[colour] != 1 and colour != PALETTE:
        return None
    kept = {b"IHDR": b"", b"IDAT": b"", b"IEND": b""}
    for kind, start, stop in _chunks(image[:end]):
        if kind in kept:
            kept[kind] += image[start:stop]
    header = bytearray(kept[b"IHDR"][: _HEAD.size + 13])
    header[_HEAD.size + 9] = 0  # the colour type
    checked = header + zlib.crc32(header[4:]).to_bytes(4, "big")
    return PNG_SIGNATURE + checked + kept[b"IDAT"] + kept[b"IEND"], header[_HEAD.size + 8]


def png_orientation(image: bytes) -> int | None:
    """Return EXIF's orientation of a PNG, 1 without any; None if it is corrupt, or for no PNG."""
    if not image.startswith(PNG_SIGNATURE):
        return None
    for kind, start, stop in _chunks(image):
        if kind == b"eXIf":
            return exif_orientation(image[start + _HEAD.size : stop - 4])
    return 1


def _is_animated(image: bytes) -> bool:
    """Whether there is a chunk of an animation; called for every decoded image, so it does little."""
    at, last = len(PNG_SIGNATURE), len(image) - _HEAD.size
    while at <= last:
        length, kind = _HEAD.unpack_from(image, at)
        if kind in ANIMATION:
            return True
        at += _REST + length
    return False


def _chunks(image: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield kind, start and stop of each chunk by its length; the last stop may be after the end."""
    at = len(PNG_SIGNATURE)
    while at + _HEAD.size <= len(image):
        length, kind = _HEAD.unpack_from(image, at)
        yield kind, at, at + _REST + length
        at += _REST + length


def _checked_chunks(image: bytes) -> Iterator[tuple[bytes, slice, int]]:
    """Yield kind, place of the data, and stop of each chunk up to IEND, after checking its CRC-32."""
    view = memoryview(image)
    for kind, start, stop in _chunks(image):
        if stop > len(image):
            break
        if zlib.crc32(view[start + 4 : stop - 4]) != int.from_bytes(view[stop - 4 : stop], "big"):
            raise BadImage(f"a PNG chunk at byte {start} does not match its CRC")
        yield kind, slice(start + _HEAD.size, stop - 4), stop
        if kind == b"IEND":
            return
    raise BadImage("truncated: the PNG has no end")


def _header(image: bytes, data: slice) -> tuple[int, int, int]:
    """Return width, height and colour type."""
    if image[data.start - 4 : data.start] != b"IHDR" or data.stop - data.start != 13:
        raise BadImage("a PNG without its header")
    width, height, _, colour = struct.unpack_from(">IIBB", image, data.start)
    if colour not in COMPONENTS:
        raise BadImage(f"a PNG of unknown colour type {colour}")
    return width, height, colour


def _check_order(kind: bytes, seen: set[bytes], last: bytes, *, has_palette: bool) -> None:
    """Raise BadImage for a chunk that must not follow those before, and for an unknown critical one."""
    if not kind.isalpha() or (kind[:1].isupper() and kind not in _CRITICAL):
        raise BadImage(f"a PNG with a critical chunk of the unknown kind {kind.decode('latin-1')!r}")
    has_image = b"IDAT" in seen
    if (
        (kind == b"IHDR")
        or (kind == b"PLTE" and has_image)
        or (kind == b"IDAT" and has_image and last != b"IDAT")
        or (kind == b"IDAT" and has_palette and b"PLTE" not in seen)
        or (kind == b"IEND" and not has_image)
    ):
        raise BadImage(f"a PNG with the {kind.decode()} chunk out of order")


GIF_SIGNATURES = (b"GIF87a", b"GIF89a")
MAX_BLOCKS = 1 << 20  # with the parts of at most 255 bytes that data consists of
_IMAGE, _EXTENSION, _TRAILER = 0x2C, 0x21, 0x3B


def read_gif(image: bytes) -> ImageInfo:
    """Return the properties of a GIF. Raises BadImage unless it has an image and an end."""
    width, height, packed = numbers("<HHB", image, 6, "GIF")
    walk = _BlockWalk(image, 13 + _colours(packed))
    images = 0
    while (kind := walk.byte()) != _TRAILER:
        if kind == _IMAGE:
            images += 1
            walk.image(width, height)
        elif kind == _EXTENSION:
            walk.byte()
            walk.data()
        else:
            raise BadImage(f"a GIF with an unknown block at byte {walk.at - 1}")
    if not images:
        raise BadImage("a GIF without an image")
    flags = ImageFlag.GIF | (ImageFlag.SEVERAL if images > 1 else ImageFlag(0))
    if walk.at != len(image):
        flags |= ImageFlag.TRAILING_BYTES
    return ImageInfo(width, height, 3, flags)


def _colours(packed: int) -> int:
    """Return the number of bytes of the table of colours that such a field declares."""
    return 3 << (packed & 7) + 1 if packed & 0x80 else 0


class _BlockWalk:
    """A place that moves from block to block. Raises BadImage at the end of the file and after MAX_BLOCKS."""

    def __init__(self, image: bytes, at: int) -> None:
        self.at = at
        self._image = image
        self._left = MAX_BLOCKS

    def byte(self) -> int:
        self._left -= 1
        if self._left < 0:
            raise BadImage(f"a GIF of more than {MAX_BLOCKS} blocks")
        if self.at >= len(self._image):
            raise truncated("GIF")
        self.at += 1
        return self._image[self.at - 1]

    def image(self, width: int, height: int) -> None:
        """Skip an image, which must lie within the screen."""
        x, y, own_width, own_height, packed = numbers("<HHHHB", self._image, self.at, "GIF")
        if not own_width or not own_height or x + own_width > width or y + own_height > height:
            raise BadImage("a GIF with an image that does not fit its screen")
        self.at += 9 + _colours(packed) + 1
        self.data()

    def data(self) -> None:
        """Skip data in parts; an empty one is the last."""
        while length := self.byte():
            self.at += length


WEBP_SIGNATURE = b"RIFF"
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
    chunks = _webp_chunks(image, end)
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


def _webp_chunks(image: bytes, end: int) -> Iterator[tuple[bytes, int, int]]:
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


BMP_SIGNATURE = b"BM"

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


NETPBM_SIGNATURES = tuple(f"P{form}{blank}".encode() for form in range(1, 7) for blank in " \t\r\n#")
_NUMBER = re.compile(rb"(?:\s|#[^\r\n]*+[\r\n])*+(\d{1,9})(?=[\s#])")  # after blanks and comments
_COMPONENTS = {1: 1, 2: 1, 3: 3, 4: 1, 5: 1, 6: 3}
_BITMAPS = (1, 4)


def read_netpbm(image: bytes) -> ImageInfo:
    """Return the properties of a PBM, PGM or PPM. Raises BadImage unless it has all its samples.

    OpenCV does not scale samples by their largest value, so this must be 255 or 65535.
    """
    form = image[1] - ord("0")
    start, width, height, *rest = _netpbm_header(image, 2 if form in _BITMAPS else 3)
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


def _netpbm_header(image: bytes, count: int) -> list[int]:
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


SUN_RASTER_SIGNATURE = b"\x59\xa6\x6a\x95"
_HEADER = 32
_PACKED = 2
_SUN_RASTER_COMPONENTS = {1: 1, 8: 1, 24: 3, 32: 3}


def read_sun_raster(image: bytes) -> ImageInfo:
    """Return the properties of a Sun raster. Raises BadImage unless it is complete and can be decoded."""
    width, height, depth, length, form, _, map_bytes = numbers(">7I", image, 4, "Sun raster")
    if depth not in _SUN_RASTER_COMPONENTS or form > _PACKED:
        raise not_decoded(f"a Sun raster of {depth} bits and type {form}")
    size = length if form == _PACKED else (width * depth + 15) // 16 * 2 * height
    end = _HEADER + map_bytes + size
    if end > len(image):
        raise truncated("Sun raster")
    flags = ImageFlag.SUN_RASTER | (ImageFlag.TRAILING_BYTES if end < len(image) else ImageFlag(0))
    return ImageInfo(width, height, 3 if map_bytes else _SUN_RASTER_COMPONENTS[depth], flags)
