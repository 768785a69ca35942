"""A PNG by its chunks: its properties, its completeness, and the still image of an animated one."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

from shardprep.formats.errors import BadImage

from .image_info import ImageFlag, ImageInfo
from .png_animation import ANIMATION, Animation
from .tiff import exif_orientation

SIGNATURE = b"\x89PNG\r\n\x1a\n"
PALETTE = 3  # a colour type
COMPONENTS = {0: 1, 2: 3, PALETTE: 3, 4: 2, 6: 4}  # by colour type; a palette expands to RGB

_CRITICAL = frozenset([b"IHDR", b"PLTE", b"IDAT", b"IEND"])
_HEAD = struct.Struct(">I4s")  # the length of a chunk's data, and its kind
_REST = _HEAD.size + 4  # with the CRC after the data


def read_png(image: bytes) -> ImageInfo:
    """Return the properties of a PNG. Raises BadImage unless its chunks are complete, known and in order.

    Unknown chunks are allowed if they are not critical. An animation must follow its specification; see
    :class:`.png_animation.Animation`.
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
    return SIGNATURE + b"".join(still)


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
    return SIGNATURE + checked + kept[b"IDAT"] + kept[b"IEND"], header[_HEAD.size + 8]


def png_orientation(image: bytes) -> int | None:
    """Return EXIF's orientation of a PNG, 1 without any; None if it is corrupt, or for no PNG."""
    if not image.startswith(SIGNATURE):
        return None
    for kind, start, stop in _chunks(image):
        if kind == b"eXIf":
            return exif_orientation(image[start + _HEAD.size : stop - 4])
    return 1


def _is_animated(image: bytes) -> bool:
    """Whether there is a chunk of an animation; called for every decoded image, so it does little."""
    at, last = len(SIGNATURE), len(image) - _HEAD.size
    while at <= last:
        length, kind = _HEAD.unpack_from(image, at)
        if kind in ANIMATION:
            return True
        at += _REST + length
    return False


def _chunks(image: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield kind, start and stop of each chunk by its length; the last stop may be after the end."""
    at = len(SIGNATURE)
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
