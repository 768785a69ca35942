"""An image's properties are read from its header; what is not intact is refused: JPEG and PNG."""

import struct

import cv2
import numpy as np
import pytest

from shardprep.formats.errors import BadImage
from shardprep.formats.images import kinds as jpeg
from shardprep.formats.images.header import READERS, read_image_header
from shardprep.formats.images.info import ImageFlag, ImageInfo
from support.image_files import (
    JPEG,
    PROGRESSIVE,
    chunk,
    encoded,
    frame,
    pixels,
    png,
    png_head,
    scan,
    segment,
    skeleton,
)

NONE = ImageFlag(0)
PNG = png(9, 6, 2)
AS_STORED = cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION


def decoded(image: bytes, mode: int) -> tuple[int, ...]:
    """The shape that the decoder gives."""
    array = cv2.imdecode(np.frombuffer(image, np.uint8), mode)
    return () if array is None else tuple(array.shape)


VARIANTS = {
    "colour": (JPEG, ImageInfo(9, 6, 3, NONE)),
    "gray": (encoded(pixels(6, 9)), ImageInfo(9, 6, 1, NONE)),
    "progressive": (PROGRESSIVE, ImageInfo(9, 6, 3, ImageFlag.PROGRESSIVE)),
    "restart markers": (encoded(pixels(6, 90, 3), ".jpg", cv2.IMWRITE_JPEG_RST_INTERVAL, 1), ImageInfo(90, 6, 3, NONE)),
    "one pixel": (encoded(pixels(1, 1, 3)), ImageInfo(1, 1, 3, NONE)),
    "fill bytes": (JPEG[:2] + b"\xff" * 9 + JPEG[2:], ImageInfo(9, 6, 3, NONE)),
    "trailing bytes": (JPEG + b"junk", ImageInfo(9, 6, 3, ImageFlag.TRAILING_BYTES)),
    "PNG": (encoded(pixels(6, 9, 3), ".png"), ImageInfo(9, 6, 3, ImageFlag.PNG)),
    "PNG with alpha": (encoded(pixels(6, 9, 4), ".png"), ImageInfo(9, 6, 4, ImageFlag.PNG)),
    "gray PNG": (encoded(pixels(6, 9), ".png"), ImageInfo(9, 6, 1, ImageFlag.PNG)),
    "gray PNG with alpha": (png(9, 6, 4), ImageInfo(9, 6, 2, ImageFlag.PNG)),
    "PNG with a palette": (png(9, 6, 3, chunk(b"PLTE", bytes(6))), ImageInfo(9, 6, 3, ImageFlag.PNG)),
    "PNG with trailing bytes": (PNG + b"\n", ImageInfo(9, 6, 3, ImageFlag.PNG | ImageFlag.TRAILING_BYTES)),
}  # fmt: skip


@pytest.mark.parametrize(("image", "info"), VARIANTS.values(), ids=VARIANTS)
def test_every_variant_is_known(image: bytes, info: ImageInfo) -> None:
    assert read_image_header(image) == info
    assert decoded(image, AS_STORED) == (info.height, info.width, 3)


@pytest.mark.parametrize("image", [JPEG, PROGRESSIVE, PNG, encoded(pixels(6, 9, 4), ".png")])
def test_an_image_cut_anywhere_is_refused(image: bytes) -> None:
    for size in range(len(image)):
        with pytest.raises(BadImage):
            read_image_header(image[:size])


def scans(count: int, *, first: bytes) -> bytes:
    return skeleton(first, *[scan(1)] * count)


REFUSED: dict[str, tuple[bytes, str]] = {
    "JPEG bomb": (skeleton(frame(30_000, 30_000), scan()), "more than"),
    "PNG bomb": (png_head(1 << 16, 1 << 16, 2) + PNG[len(png_head(9, 6, 2)) :], "more than"),
    "PNG of another width": (PNG[:16] + b"\0\1\0\0" + PNG[20:], "CRC"),
    "one row too many": (skeleton(frame(1 << 13, (1 << 13) + 1), scan()), "more than"),
    "no width": (skeleton(frame(0, 9), scan()), "0x9 pixels"),
    "no height": (skeleton(frame(9, 0), scan()), "9x0 pixels"),
    "PNG without width": (png(0, 9, 2), "0x9 pixels"),
    "progressive scan bomb": (scans(300, first=frame(9, 6, marker=0xC2)), "scans"),
    "scan bomb": (scans(300, first=frame(9, 6)), "scans"),
    "fill bytes without end": (b"\xff\xd8" + b"\xff" * 20_000 + JPEG[2:], "more than 10000 markers"),
    "segments without end": (skeleton(*[segment(0xE5)] * 10_001, frame(9, 6), scan()), "more than 10000 markers"),
    "two components": (skeleton(frame(9, 6, 2), scan()), "2 components"),
    "short frame": (skeleton(segment(0xC0, b"\x08\0\x06\0\x09"), scan()), "too short"),
    "frame without its components": (skeleton(segment(0xC0, frame(9, 6)[4:-1]), scan()), "too short"),
    "no frame": (skeleton(scan()), "without a frame"),
    "no scan": (skeleton(frame(9, 6)) + bytes(9), "before any scan"),
    "two beginnings": (b"\xff\xd8" + JPEG, "before any scan"),
    "no marker": (JPEG[:2] + b"\xff\xe0\0\4ab" + b"cd" + JPEG[2:], "not a JPEG marker"),
    "empty scan header at the end": (skeleton(frame(9, 6))[:-2] + b"\xff\xda\0\2", "without"),
    "segment shorter than its length": (JPEG[:2] + b"\xff\xe0\0\1" + JPEG[2:], "does not fit"),
    "segment longer than the file": (JPEG[:2] + b"\xff\xe0\xff\xff" + JPEG[2:], "does not fit"),
    "unknown colour type": (png(9, 6, 5), "unknown colour type 5"),
    "PNG without header": (PNG[:8] + PNG[33:], "without its header"),
    "PNG without end": (PNG[:-12], "no end"),
}  # fmt: skip


@pytest.mark.parametrize(("image", "message"), REFUSED.values(), ids=REFUSED)
def test_what_would_harm_a_decoder_is_refused(image: bytes, message: str) -> None:
    with pytest.raises(BadImage, match=message):
        read_image_header(image)


def test_bytes_that_trip_the_reader_of_images_are_a_bad_image(monkeypatch: pytest.MonkeyPatch) -> None:
    def trip(image: bytes) -> None:
        raise struct.error("short")

    monkeypatch.setitem(READERS, (jpeg.JPEG_SIGNATURE,), trip)
    with pytest.raises(BadImage, match=r"cannot be read \(error: short\)") as caught:
        read_image_header(b"\xff\xd8\xff")
    assert isinstance(caught.value.__cause__, struct.error)
