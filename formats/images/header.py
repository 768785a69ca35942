"""Properties and limits of images: each is read from its bytes, which are checked to be complete.

JPEG, PNG and WebP, which make up large datasets, are read from their headers: a decoder is no checksum
(it accepts 99.65% of single flipped bytes) and takes a hundred times as long. ``prep verify --level decode``
finds what only decoding reveals. A file of any other kind is decoded once.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import IntFlag
from itertools import islice

from shardprep.formats.errors import BadImage, UsageError
from shardprep.formats.runtime.files import PASSED_ON_ERRORS, reason_of

MAX_PIXELS = 1 << 26  # 64 Mpx decode to 200 MB; ILSVRC12's largest image has 40 Mpx
EXTREME_ASPECT = 16  # longer to shorter side; resizing a longer image could exhaust the memory
CONVERT_IT = ": convert it to PNG or JPEG"
TOO_MANY = f"more than {MAX_PIXELS:,} pixels: cut it into tiles, or shrink it"
MAX_SIDE, MAX_JPEG_SIDE = 1_000_000, 65_500  # of libpng and libjpeg


class ImageFlag(IntFlag):
    """The kind and unusual properties of an image, stored in the index column ``flags``.

    An image without a flag of :data:`KINDS` is a JPEG. ``SEVERAL`` marks a TIFF of several pages, or an
    animated WebP, GIF or AVIF: the first page or frame is decoded. ``CROP_READY`` marks a JPEG with a table
    of its segments.
    """

    PNG = 1
    PROGRESSIVE = 2
    ADOBE = 4
    TRAILING_BYTES = 8
    CORRUPT_EXIF = 16
    WEBP = 32
    TIFF = 64
    BMP = 128
    GIF = 256
    JPEG_2000 = 512
    NETPBM = 1024
    AVIF = 2048
    SUN_RASTER = 4096
    SEVERAL = 8192
    CROP_READY = 32768


CROP_READY = int(ImageFlag.CROP_READY)  # for NumPy, which looks up attributes of an enum's class, slowly

KINDS = {
    "JPEG": ImageFlag(0),
    "PNG": ImageFlag.PNG,
    "WebP": ImageFlag.WEBP,
    "TIFF": ImageFlag.TIFF,
    "BMP": ImageFlag.BMP,
    "GIF": ImageFlag.GIF,
    "JPEG 2000": ImageFlag.JPEG_2000,
    "Netpbm": ImageFlag.NETPBM,
    "AVIF": ImageFlag.AVIF,
    "Sun raster": ImageFlag.SUN_RASTER,
}
"""The flag of each kind, by its name."""
_FLAGS = {name: int(flag) for name, flag in KINDS.items()}  # integers: enum members are slow to combine
LATER_KINDS = {name: flag for name, flag in KINDS.items() if flag > ImageFlag.PNG}
"""The kinds that early readers of format 1.0 do not know."""


def kind_of(flags: int) -> str:
    return next((name for name, flag in _FLAGS.items() if flag & flags), "JPEG")


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """The properties of an image.

    Attributes:
        width: Pixels of the decoded image, before EXIF is applied.
        height: Pixels, likewise.
        components: Number of coded channels: 1 for gray, 2 for gray with alpha, 3 for colour (also from a
            palette), 4 for CMYK or colour with alpha.
        flags: The kind and unusual properties.
        orientation: EXIF orientation (1 to 8) of a JPEG or WebP; 1 without one, and for any other kind.
    """

    width: int
    height: int
    components: int
    flags: ImageFlag
    orientation: int = 1


DEFAULT_QUALITY = 90  # libjpeg's, of a shrunk image
MAX_GROWTH = 1.25  # an image that recoding enlarges more stays as it is, so that shard sizes can be planned

NO_IMAGE = ImageInfo(0, 0, 0, ImageFlag(0))  # of a record without an image


_CAUSES = ("not an image", "truncated", "too large", "does not decode", "crashes the decoder")


def cause_of(reason: str) -> str:
    """Return the cause in a message, such as "truncated", without the details of one image."""
    if reason.endswith(CONVERT_IT):
        return reason.removesuffix(CONVERT_IT)
    return next((cause for cause in _CAUSES if reason.startswith(cause)), "damaged")


MAX_CHUNKS = 1 << 16  # of a WebP or PNG; photographs have up to thousands, an animation one per frame
NONE = ImageFlag(0)


def not_decoded(what: str) -> str:
    return f"{what}, which OpenCV does not decode{CONVERT_IT}"


def decoded_wrongly(what: str) -> str:
    return f"{what}, which OpenCV decodes to wrong pixels{CONVERT_IT}"


def _trailing_flag(end: int, image: bytes) -> ImageFlag:
    return ImageFlag.TRAILING_BYTES if end < len(image) else NONE


WEBP_SIGNATURE = b"RIFF"
_HAS_ANIMATION, _HAS_ALPHA = 0x02, 0x10
_STILL = frozenset([b"VP8 ", b"VP8L"])


def read_webp(image: bytes) -> ImageInfo:
    if image[8:12] != b"WEBP":
        raise BadImage(f"not an image (a RIFF file of the kind {image[8:12].decode('latin-1')!r})")
    at, end = 12, 8 + int.from_bytes(image[4:8], "little")
    if end > len(image):
        raise BadImage("truncated: the WebP has no end")
    flags = ImageFlag.WEBP | _trailing_flag(end, image)
    places: dict[bytes, slice] = {}
    for _ in range(MAX_CHUNKS):
        kind, length = struct.unpack_from("<4sI", image, at)
        start, stop = at + 8, at + 8 + length
        if stop > end:
            raise BadImage(f"a WebP chunk at byte {at} does not fit")
        if not places and kind != b"VP8X":  # what follows a single image is ignored
            return _read_still(image, kind, start, flags)
        if kind not in places or kind not in _STILL:  # a decoder takes the first image
            places[kind] = slice(start, stop)
        at = stop + length % 2
        if at >= end:
            break
    else:
        raise BadImage(f"a WebP of more than {MAX_CHUNKS} chunks")
    width, height = (1 + int.from_bytes(image[at : at + 3], "little") for at in (24, 27))
    images = places.keys() & ({b"ANMF"} if image[20] & _HAS_ANIMATION else _STILL)
    if not images:
        raise BadImage("a WebP without an image")
    for kind in images & _STILL:
        info = _read_still(image, kind, places[kind].start, flags)
        if (info.width, info.height) != (width, height):
            raise BadImage("a WebP whose image and canvas differ in size")
    orientation = exif_orientation(image[places[b"EXIF"]]) if b"EXIF" in places else 1
    if orientation is None:
        flags |= ImageFlag.CORRUPT_EXIF
    if image[20] & _HAS_ANIMATION:
        flags |= ImageFlag.SEVERAL
    return ImageInfo(width, height, 4 if image[20] & _HAS_ALPHA else 3, flags, orientation or 1)


def _read_still(image: bytes, kind: bytes, at: int, flags: ImageFlag) -> ImageInfo:
    if kind == b"VP8L" and image[at] == 0x2F:
        (bits,) = struct.unpack_from("<I", image, at + 1)
        return ImageInfo(1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF), 3 + (bits >> 28 & 1), flags)
    if kind == b"VP8 " and image[at + 3 : at + 6] == b"\x9d\x01\x2a" and not image[at] & 1:  # a key frame
        width, height = struct.unpack_from("<HH", image, at + 6)
        return ImageInfo(width & 0x3FFF, height & 0x3FFF, 3, flags)
    raise BadImage("a WebP without an image")


def _decode(image: bytes, flags: ImageFlag, components: int = 0) -> ImageInfo:
    """Return the properties of an image that decodes; ``components`` 0 stands for the decoded channels."""
    from shardprep.formats.images.decode import cv2, decode  # start-up time: OpenCV

    mode = cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION if components else cv2.IMREAD_UNCHANGED
    log = getattr(cv2.utils, "logging", cv2)  # OpenCV 4 has its functions itself
    level = log.setLogLevel(0)  # silent; it warns of tags that it does not know
    try:
        height, width, channels = (*decode(image, mode).shape, 1)[:3]
    except BadImage as error:
        if error.message.startswith("too large"):
            raise
        raise BadImage(not_decoded(f"a truncated, damaged or unusual {kind_of(flags)}")) from error
    finally:
        log.setLogLevel(level)
    return ImageInfo(width, height, components or channels, flags)


def read_gif(image: bytes) -> ImageInfo:
    import numpy as np  # start-up time, and OpenCV

    from shardprep.formats.images.decode import cv2

    flags = ImageFlag.GIF | (NONE if image.endswith(b";") else ImageFlag.TRAILING_BYTES)
    width, height = struct.unpack_from("<HH", image, 6)
    if width * height > MAX_PIXELS:  # which OpenCV's limit covers only if this package imported it
        return ImageInfo(width, height, 3, flags)
    info = _decode(image, flags, components=3)
    frames = cv2.imdecodemulti(np.frombuffer(image, np.uint8), cv2.IMREAD_GRAYSCALE, range=(0, 2))[1]
    return replace(info, flags=flags | ImageFlag.SEVERAL) if len(frames) > 1 else info


_CORE = 12  # bytes of the oldest header
_RLE8, _RLE4, _MASKS = 1, 2, 3
_USUAL_MASKS = {16: ((0x7C00, 0x03E0, 0x001F), (0xF800, 0x07E0, 0x001F)), 32: ((0xFF0000, 0xFF00, 0xFF),)}


def read_bmp(image: bytes) -> ImageInfo:
    size, start, header = struct.unpack_from("<I4xII", image, 2)
    depth, packing, packed = image[24], 0, 0
    if header != _CORE:
        depth, packing, packed = struct.unpack_from("<HII", image, 28)
    if packing == _MASKS and struct.unpack_from("<3I", image, 54) not in _USUAL_MASKS.get(depth, ()):
        raise BadImage(decoded_wrongly("a BMP of unusual colour masks"))
    components, colours = 0, image[26 : 26 + 3 * (1 << min(depth, 8))]
    if header == _CORE:  # which OpenCV decodes to one channel unless colour is requested
        components = 1 if depth <= 8 and colours[::3] == colours[1::3] == colours[2::3] else 3
    info = _decode(image, ImageFlag.BMP, components)
    row = (info.width * depth + 31) // 32 * 4
    end = start + (packed if packing in (_RLE8, _RLE4) else row * info.height)
    if end > len(image):
        raise BadImage("truncated: the BMP has no end")
    return replace(info, flags=info.flags | _trailing_flag(max(end, size), image))


_NUMBER = rb"(?:\s|#[^\r\n]*+[\r\n])++(\d{1,9})"  # after blanks and comments
_NETPBM = re.compile(rb"(?:P[14]%b|P[2356]%b)(?=[\s#])" % (_NUMBER * 2, _NUMBER * 3))


def read_netpbm(image: bytes) -> ImageInfo:
    header = _NETPBM.match(image)
    if header is None:
        raise BadImage("a Netpbm file without the numbers of its header")
    largest = int(header[5] or 255)
    if largest not in (255, 65535):
        raise BadImage(decoded_wrongly(f"a Netpbm file with values up to {largest}"))
    form = image[1:2]
    info = _decode(image, ImageFlag.NETPBM, components=3 if form in b"36" else 1)
    if form in b"123":  # text
        return info
    bits = info.components * (1 if form == b"4" else 8 if largest == 255 else 16)
    end = header.end() + 1 + (info.width * bits + 7) // 8 * info.height
    return replace(info, flags=info.flags | _trailing_flag(end, image))


_PACKED = 2


def read_sun_raster(image: bytes) -> ImageInfo:
    width, height, depth, length, form, _, map_bytes = struct.unpack_from(">7I", image, 4)
    end = 32 + map_bytes + (length if form == _PACKED else (width * depth + 15) // 16 * 2 * height)
    return _decode(image, ImageFlag.SUN_RASTER | _trailing_flag(end, image), components=3 if map_bytes else 0)


def read_avif(image: bytes) -> ImageInfo:
    # OpenCV ignores rotation and mirroring in the image's properties, so neither is recorded
    brands = image[8 : min(int.from_bytes(image[:4], "big"), 1024)]
    if b"avif" not in brands and b"avis" not in brands:
        if re.search(b"hei[cxms]|hev[cx]|m[is]f1", brands):
            raise BadImage(not_decoded("HEIC"))
        raise BadImage(f"not an image (a file of the kind {image[8:12].decode('latin-1')!r})")
    return _decode(image, ImageFlag.AVIF | (ImageFlag.SEVERAL if image[8:12] == b"avis" else NONE))


_CODESTREAM = b"\xff\x4f\xff\x51"
_COLOUR = re.compile(rb"colr(.)..(.{4})", re.DOTALL)
_SRGB, _GRAY = 16, 17


def read_jpeg2000(image: bytes) -> ImageInfo:
    start = image.find(_CODESTREAM)
    if start < 0:
        raise BadImage("a JPEG 2000 without a codestream")
    boxes = image[:start]
    if b"pclr" in boxes:
        raise BadImage(decoded_wrongly("a JPEG 2000 with a palette"))
    colour = _COLOUR.search(boxes)
    if colour and colour[1] == b"\1" and int.from_bytes(colour[2], "big") not in (_SRGB, _GRAY):
        raise BadImage(decoded_wrongly("a JPEG 2000 with colours that are not sRGB or gray"))
    (components,) = struct.unpack_from(">H", image, start + 40)
    if not 1 <= components <= 4:
        raise BadImage(not_decoded(f"a JPEG 2000 of {components} components"))
    if not set(image[start + 42 : start + 42 + 3 * components : 3]) <= {7, 15}:
        raise BadImage(not_decoded("a JPEG 2000 with samples that do not have 8 or 16 bits"))
    if image.rfind(b"\xff\xd9", start) < 0:
        raise BadImage("truncated: the JPEG 2000 has no end")
    ends_file = not boxes or boxes[-8:-4] == bytes(4)  # without the size of its box
    has_more = ends_file and not image.endswith(b"\xff\xd9")
    return _decode(image, ImageFlag.JPEG_2000 | (ImageFlag.TRAILING_BYTES if has_more else NONE), components)


MAX_SAMPLES = 16  # of a pixel
_COMPRESSION = 259
# OpenCV's wheels are built without LZMA, Zstandard and WebP, and decode such images to black.
_COMPRESSIONS = frozenset([1, 2, 3, 4, 5, 7, 8, 32773, 32946])
_UNSIGNED = {1: "B", 3: "H", 4: "I", 13: "I", 16: "Q"}
_TYPE_BYTES = dict(zip((*range(1, 14), 16, 17, 18), map(int, "1124811248484888"), strict=True))
_BITS, _PHOTOMETRIC, _SAMPLES, _PLANAR = 258, 262, 277, 284
_TILE_WIDTH, _TILE_HEIGHT, _SAMPLE_FORMAT = 322, 323, 339
_GRAY_INVERTED, _TIFF_GRAY, _RGB, _PALETTE, _CMYK, _YCBCR = 0, 1, 2, 3, 5, 6
_DECODED_SAMPLES: dict[int, dict[int, tuple[int, ...]]] = {
    1: {_GRAY_INVERTED: (1,), _TIFF_GRAY: (1,), _PALETTE: (1,)},
    4: {_PALETTE: (1,)},
    8: {_GRAY_INVERTED: (1, 2), _TIFF_GRAY: (1, 2), _RGB: (3, 4), _PALETTE: (1,), _CMYK: (4,), _YCBCR: (3,)},
    16: {_GRAY_INVERTED: (1,), _TIFF_GRAY: (1,), _RGB: (3, 4)},
}
"""The numbers of samples that OpenCV decodes to their pixels, by bits and photometric interpretation."""


def read_tiff(image: bytes) -> ImageInfo:
    """Return the properties of a TIFF's first page. Raises BadImage unless it decodes to its pixels.

    OpenCV always applies a TIFF's orientation, so the size is the rotated image's, and none is recorded.
    """
    tags, pages = _directories(image)
    if (compression := tags.get(_COMPRESSION, (1,))[0]) not in _COMPRESSIONS:
        raise BadImage(not_decoded(f"a TIFF with compression {compression}"))
    bits, photometric = tags.get(_BITS, (1,))[0], tags.get(_PHOTOMETRIC, (-1,))[0]
    samples, form = tags.get(_SAMPLES, (1,))[0], tags.get(_SAMPLE_FORMAT, (1,))[0]
    if form != 1 or samples not in _DECODED_SAMPLES.get(bits, {}).get(photometric, ()):
        kind = f"sample format {form}, photometric interpretation {photometric}"
        raise BadImage(not_decoded(f"a TIFF of {samples} x {bits} bits, {kind}"))
    if tags.get(_TILE_WIDTH, (0,))[0] * tags.get(_TILE_HEIGHT, (0,))[0] > MAX_PIXELS:
        raise BadImage(f"too large: a TIFF with tiles of {TOO_MANY}")
    is_planar = samples > 1 and tags.get(_PLANAR, (1,)) != (1,)
    if bits == 16 and (is_planar or (samples == 1 and _TILE_WIDTH in tags)):
        raise BadImage(decoded_wrongly("a TIFF of 16 bits in planes or gray tiles"))
    flags = ImageFlag.TIFF | (ImageFlag.SEVERAL if pages > 1 else NONE)
    return _decode(image, flags, 3 if photometric == _PALETTE else samples)


def _directories(image: bytes) -> tuple[dict[int, tuple[int, ...]], int]:
    """Return the first page's tags of up to MAX_SAMPLES unsigned numbers, and the number of pages."""
    order, is_big = "<" if image[:2] == b"II" else ">", b"*" not in image[2:4]
    forms = ("Q", "HHQ", "Q") if is_big else ("H", "HHI", "I")
    count_form, entry_form, pointer = (order + form for form in forms)
    before, step = struct.calcsize(entry_form), struct.calcsize(entry_form) + struct.calcsize(pointer)
    tags: dict[int, tuple[int, ...]] = {}
    pages: set[int] = set()
    (at,) = struct.unpack_from(pointer, image, 8 if is_big else 4)
    while at or not pages:
        if at in pages or len(pages) > MAX_CHUNKS:
            raise BadImage(f"a TIFF of pages in a circle, or of more than {MAX_CHUNKS}")
        (count,) = struct.unpack_from(count_form, image, at)
        first = at + struct.calcsize(count_form)
        for entry in range(first, first + count * step, step) if not pages else ():
            tag, kind, length = struct.unpack_from(entry_form, image, entry)
            size, start = _TYPE_BYTES.get(kind, 0) * length, entry + before
            if before + size > step:
                (start,) = struct.unpack_from(pointer, image, start)
            if start + size > len(image):
                raise BadImage("truncated: the TIFF has no end")
            if kind in _UNSIGNED and 1 <= length <= MAX_SAMPLES:
                tags.setdefault(tag, struct.unpack_from(f"{order}{length}{_UNSIGNED[kind]}", image, start))
        pages.add(at)
        (at,) = struct.unpack_from(pointer, image, first + count * step)
    return tags, len(pages)


JPEG_SIGNATURE = b"\xff\xd8\xff"
MAX_MARKERS = 10_000  # before the first scan, with fill bytes; photographs have dozens
MAX_SCANS = 100  # libjpeg decodes a progressive file once per scan: thousands are an attack

SOI, EOI, SOS, APP1, APP14 = 0xD8, 0xD9, 0xDA, 0xE1, 0xEE
STARTS_OF_FRAME = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # DHT, JPG and DAC lie among them
PROGRESSIVE_FRAMES = frozenset({0xC2, 0xCA})
DECODED_FRAMES = PROGRESSIVE_FRAMES | {0xC0, 0xC1, 0xC9}  # Huffman-coded and arithmetic
STANDALONE = frozenset({0x01, *range(0xD0, 0xD8)})
_SCAN = re.compile(rb"\xff\xda\0[\x06\x08\x0a\x0c\x0e][\0-\4]")  # with a length that libjpeg accepts


def read_jpeg(image: bytes) -> ImageInfo:
    flags, orientation = ImageFlag(0), 1
    frame: tuple[int, int, int] | None = None
    for marker, start, stop in marker_segments(image):
        if marker in STARTS_OF_FRAME and frame is None:
            frame = parse_frame(image[start:stop])
            if marker not in DECODED_FRAMES or image[start] != 8:  # of some, OpenCV ignores a reduction
                raise BadImage(not_decoded("a JPEG that is lossless, hierarchical or of more than 8 bits"))
            if marker in PROGRESSIVE_FRAMES:
                flags |= ImageFlag.PROGRESSIVE
        elif marker == APP14 and image[start : start + 5] == b"Adobe":
            flags |= ImageFlag.ADOBE
        elif marker == APP1 and image[start : start + 6] == b"Exif\0\0":
            exif = exif_orientation(image[start + 6 : stop])
            orientation = exif or 1  # the last block's, as in all indexes of format 1
            if exif is None:
                flags |= ImageFlag.CORRUPT_EXIF
        elif marker == SOS:
            if frame is None or start == stop:
                raise BadImage("a JPEG scan without a frame, or without components")
            # 0x00 follows every 0xFF in the coded data
            if (end := image.rfind(b"\xff\xd9", stop)) < 0:
                raise BadImage("truncated: the JPEG has no end")
            has_several = bool(flags & ImageFlag.PROGRESSIVE) or image[start] < frame[2]
            if has_several and any(islice(_SCAN.finditer(image, stop), MAX_SCANS - 1, None)):
                raise BadImage(f"a JPEG of more than {MAX_SCANS} scans")
            flags |= _trailing_flag(end + 2, image)
    if frame is None:
        raise BadImage("a JPEG without a frame")
    height, width, components = frame
    return ImageInfo(width, height, components, flags, orientation)


def jpeg_size(image: bytes | bytearray | memoryview) -> tuple[int, int] | None:
    """Return width and height from a JPEG's first frame; None if it has no frame or no size."""
    with suppress(BadImage):
        for marker, start, stop in marker_segments(image):
            if marker in STARTS_OF_FRAME:
                height, width, _ = parse_frame(image[start:stop])
                return (width, height) if width and height else None
    return None


def jpeg_orientation(image: bytes | bytearray | memoryview) -> int | None:
    """Return the EXIF orientation of a JPEG, 1 without one; None if corrupt, or not a JPEG.

    Of several EXIF blocks, OpenCV applies the first one with an orientation.
    """
    try:
        orientations = [
            exif_orientation(bytes(image[start + 6 : stop]))
            for marker, start, stop in marker_segments(image)
            if marker == APP1 and image[start : start + 6] == b"Exif\0\0"
        ]
    except BadImage:
        return None
    return next(filter(None, orientations), None if None in orientations else 1)


def marker_segments(image: bytes | bytearray | memoryview) -> Iterator[tuple[int, int, int]]:
    """Yield (marker, start, stop) of each segment's payload, up to and including the first scan's header."""
    if image[: len(JPEG_SIGNATURE)] != JPEG_SIGNATURE:
        raise BadImage("not a JPEG")
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


def parse_frame(payload: bytes | bytearray | memoryview) -> tuple[int, int, int]:
    """Return (height, width, components) from the payload of a start of frame."""
    if len(payload) < 6 or len(payload) < 6 + 3 * payload[5]:
        raise BadImage("a JPEG frame header that is too short")
    _, height, width, components = struct.unpack_from(">BHHB", payload)
    if components not in (1, 3, 4):
        raise BadImage(f"a JPEG of {components} components")
    return height, width, components


def exif_orientation(tiff: bytes) -> int | None:
    """Return the orientation (1 to 8) in an EXIF block; 0 without one, None if the block is corrupt."""
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
    return 0


PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
PALETTE = 3  # a colour type
COMPONENTS = {0: 1, 2: 3, PALETTE: 3, 4: 2, 6: 4}  # by colour type; a palette expands to RGB
ANIMATION = frozenset([b"acTL", b"fcTL", b"fdAT"])

_LETTERS = {b"IHDR": "H", b"PLTE": "P", b"IDAT": "D", b"IEND": "E"}
_ORDER = re.compile("H[P.]*D+[.]*E")
_HEAD = struct.Struct(">I4s")  # the length of a chunk's data, and its kind
_REST = _HEAD.size + 4  # with the CRC after the data


def read_png(image: bytes) -> ImageInfo:
    # unknown chunks are allowed unless they are critical; the frames of an animation are not looked at
    width, height, colour, end = _check_chunks(image)
    return ImageInfo(width, height, COMPONENTS[colour], ImageFlag.PNG | _trailing_flag(end, image))


def _check_chunks(image: bytes) -> tuple[int, int, int, int]:
    """Check all chunks, and return width, height, colour type and the end of the last chunk."""
    view = memoryview(image)
    width = height = colour = 0
    order = ""  # a letter for each chunk
    for kind, start, stop in _chunks(image):
        if stop > len(image):
            break
        if zlib.crc32(view[start + 4 : stop - 4]) != int.from_bytes(view[stop - 4 : stop], "big"):
            raise BadImage(f"a PNG chunk at byte {start} does not match its CRC")
        data = view[start + _HEAD.size : stop - 4]
        if not order:
            if kind != b"IHDR" or len(data) != 13:
                raise BadImage("a PNG without its header")
            width, height, _, colour = struct.unpack_from(">IIBB", data)
            if colour not in COMPONENTS:
                raise BadImage(f"a PNG of unknown colour type {colour}")
        letter = _LETTERS.get(kind, ".")
        if not kind.isalpha() or (letter == "." and kind[:1].isupper()):
            raise BadImage(f"a PNG with a critical chunk of the unknown kind {kind.decode('latin-1')!r}")
        order += letter
        if len(order) > MAX_CHUNKS:
            raise BadImage(f"a PNG of more than {MAX_CHUNKS} chunks")
        if kind == b"IEND":
            if not _ORDER.fullmatch(order) or (colour == PALETTE and "P" not in order):
                raise BadImage("a PNG with chunks out of order")
            return width, height, colour, stop
    raise BadImage("truncated: the PNG has no end")


def remove_animation(image: bytes) -> bytes:
    """Return a PNG without its animation, for which OpenCV writes out of bounds. Raises BadImage."""
    if all(kind not in ANIMATION for kind, _, _ in _chunks(image)):
        return image
    *_, end = _check_chunks(image)
    still = (image[start:stop] for kind, start, stop in _chunks(image[:end]) if kind not in ANIMATION)
    return PNG_SIGNATURE + b"".join(still)


def as_gray(image: bytes, *, key: str | None = None) -> tuple[bytes, int] | None:
    """Return the raw samples of a gray or palette PNG as a gray PNG, and the bits per sample.

    The palette and all other chunks not needed to decode are dropped. Returns None for a PNG with colours or
    alpha. Raises BadImage, with ``key``, for a PNG that :func:`read_png` refuses.
    """
    try:
        _, _, colour, end = _check_chunks(image)
    except BadImage as error:
        raise BadImage(error.message, key=key) from error
    if COMPONENTS[colour] != 1 and colour != PALETTE:
        return None
    chunks = {kind: bytearray() for kind in (b"IHDR", b"IDAT", b"IEND")}
    for kind, start, stop in _chunks(image[:end]):
        if kind in chunks:
            chunks[kind] += image[start:stop]
    header = chunks[b"IHDR"][: _HEAD.size + 13]
    header[_HEAD.size + 9] = 0  # the colour type
    header += zlib.crc32(header[4:]).to_bytes(4, "big")
    return PNG_SIGNATURE + header + chunks[b"IDAT"] + chunks[b"IEND"], header[_HEAD.size + 8]


def png_orientation(image: bytes) -> int | None:
    """Return the EXIF orientation of a PNG, 0 without one; None if corrupt, or not a PNG."""
    if not image.startswith(PNG_SIGNATURE):
        return None
    for kind, start, stop in _chunks(image):
        if kind == b"eXIf":
            return exif_orientation(image[start + _HEAD.size : stop - 4])
    return 0


def _chunks(image: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield kind, start and stop of each chunk; the last stop may lie beyond the end of the image."""
    at = len(PNG_SIGNATURE)
    while at + _HEAD.size <= len(image):
        length, kind = _HEAD.unpack_from(image, at)
        yield kind, at, at + _REST + length
        at += _REST + length


TIFF_SIGNATURE = rb"II[*+]\0|MM\0[*+]"
GIF_SIGNATURE = b"GIF8[79]a"
JPEG2000_SIGNATURE = b"\0\0\0\x0cjP  \r\n\x87\n|" + _CODESTREAM
READERS: dict[bytes, Callable[[bytes], ImageInfo]] = {
    JPEG_SIGNATURE: read_jpeg,
    PNG_SIGNATURE: read_png,
    WEBP_SIGNATURE: read_webp,
    TIFF_SIGNATURE: read_tiff,
    b"BM": read_bmp,
    GIF_SIGNATURE: read_gif,
    JPEG2000_SIGNATURE: read_jpeg2000,
    rb"P[1-6][ \t\r\n#]": read_netpbm,
    b"\x59\xa6\x6a\x95": read_sun_raster,
    rb"[\s\S]{4}ftyp": read_avif,
}
"""The reader of each kind of image, by a regex of its signature.

A reader raises BadImage unless the file is intact and decodes to its pixels.
"""
_UNREADABLE = {
    b"\xff\x0a|\0\0\0\x0cJXL \r\n\x87\n": not_decoded("JPEG XL"),
    b"v/1\1": not_decoded("OpenEXR"),
    b"8BPS": not_decoded("PSD"),
    b"\0\0\1\0": not_decoded("ICO"),
    b"<svg": not_decoded("SVG"),
    b"%PDF": not_decoded("PDF"),
    rb"[\s\S]{128}DICM": not_decoded("DICOM"),
    b"SIMPLE  =": not_decoded("FITS"),
    b"P7": decoded_wrongly("PAM"),  # its channels are in another order
    b"P[Ff]": decoded_wrongly("PFM"),  # its floats are clipped at 255, as those of Radiance HDR
    rb"#\?(RADIANCE|RGBE)": decoded_wrongly("Radiance HDR"),
    rb"version https://git-lfs|/annex/objects/": "not an image (a pointer of Git LFS or git-annex; download its file first)",
}


def read_image_header(image: bytes | bytearray | memoryview) -> ImageInfo:
    """Return the properties of ``image``, the bytes of an image file; they alone determine its kind.

    Raises BadImage unless OpenCV decodes the kind (JPEG, PNG, WebP, TIFF, BMP, GIF, JPEG 2000, Netpbm, AVIF,
    Sun raster) and the file is intact. JPEG, PNG and WebP are not decoded: a JPEG has a frame, a scan and an
    end; a PNG's chunks match their CRCs and are in order; a WebP's chunks lie within it. Any other file
    decodes, which a hostile one may use to crash the process. More than ``MAX_PIXELS`` pixels, ``MAX_SCANS``
    scans or endless parts count as attacks on the decoder.
    """
    if not isinstance(image, bytes | bytearray | memoryview):
        raise UsageError(f"give an image's bytes (Path(path).read_bytes()), not {image!r}")
    image = bytes(image)
    try:
        for signature, reader in READERS.items():
            if re.match(signature, image):
                info = reader(image)
                break
        else:
            begins = f"starts with {image[:8].hex(' ')}" if image else "empty"
            refused = (reason for signature, reason in _UNREADABLE.items() if re.match(signature, image))
            raise BadImage(next(refused, f"not an image ({begins})"))
    except PASSED_ON_ERRORS:
        raise
    except (struct.error, IndexError) as error:
        raise BadImage("truncated: the file ends within its header") from error
    except Exception as error:  # hostile bytes may cause any exception; it stays visible as the cause
        raise BadImage(reason_of(error)) from error
    if not info.width or not info.height:
        raise BadImage(f"an image of {info.width}x{info.height} pixels")
    if info.width * info.height > MAX_PIXELS:
        raise BadImage(f"too large: {info.width}x{info.height} is {TOO_MANY}")
    most = MAX_JPEG_SIDE if reader is read_jpeg else MAX_SIDE
    if max(info.width, info.height) > most:
        raise BadImage(f"too large: {info.width}x{info.height} has a side of more than {most:,} pixels")
    return info


def begins_as_image(head: bytes) -> bool:
    """Whether a file with these first bytes is certainly an image: no text begins like it."""
    signatures = (JPEG_SIGNATURE, PNG_SIGNATURE, TIFF_SIGNATURE, GIF_SIGNATURE, JPEG2000_SIGNATURE)
    return bool(re.match(b"|".join(signatures), head)) or head[8:12] in (b"WEBP", b"avif", b"heic")


def is_image_file(data: bytes) -> bool:
    """Whether the bytes begin like an image that can be read."""
    return any(re.match(signature, data) for signature in READERS)
