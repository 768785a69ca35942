"""Each kind that OpenCV decodes is read from its header, or decoded once; others are refused by name."""

import struct
from pathlib import Path

import cv2
import numpy as np
import pytest

from shardprep.formats import BadImage, ImageFlag, read_image_header, verify
from shardprep.formats.images import header as jpeg
from shardprep.formats.images.header import MAX_CHUNKS, READERS, ImageInfo
from shardprep.formats.verification.verify import LEVELS
from shardprep.loaders import decode_rgb
from support.datasets import converted
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
    tiff,
    with_exif,
)
from support.image_kinds import (
    COLOUR,
    GRAY,
    JP2,
    KINDS,
    LOSSLESS,
    SIX,
    bmp,
    chunk_of_riff,
    codestream,
    extended_webp,
    raw_tiff,
    webp,
)
from support.memory import memory_below
from support.resealed import reseal
from support.source_builders import write

TEXT_OR_PADDED = {"plain.pbm", "plain.pgm", "plain.ppm", "pages.tiff", "trailing bytes", "trailing scans"}


NONE = ImageFlag(0)
PNG = png(9, 6, 2)
CORE_BMP = (
    b"BM" + struct.pack("<IIIIHHHH", 0, 0, 26 + 768, 12, 5, 4, 1, 8) + bytes(range(256)) * 3 + bytes(32)
)
COMMON = {
    "colour": (JPEG, ImageInfo(9, 6, 3, NONE)),
    "gray": (encoded(pixels(6, 9)), ImageInfo(9, 6, 1, NONE)),
    "progressive": (PROGRESSIVE, ImageInfo(9, 6, 3, ImageFlag.PROGRESSIVE)),
    "restart markers": (encoded(pixels(6, 90, 3), ".jpg", cv2.IMWRITE_JPEG_RST_INTERVAL, 1), ImageInfo(90, 6, 3, NONE)),
    "no orientation": (with_exif(JPEG, tiff("<", (0x010F, 2, 7))), ImageInfo(9, 6, 3, NONE)),
    "a marker alone": (JPEG[:2] + b"\xff\x01" + JPEG[2:], ImageInfo(9, 6, 3, NONE)),
    "one pixel": (encoded(pixels(1, 1, 3)), ImageInfo(1, 1, 3, NONE)),
    "fill bytes": (JPEG[:2] + b"\xff" * 9 + JPEG[2:], ImageInfo(9, 6, 3, NONE)),
    "trailing bytes": (JPEG + b"junk", ImageInfo(9, 6, 3, ImageFlag.TRAILING_BYTES)),
    "trailing scans": (PROGRESSIVE + b"\xff\xda\0\0" * 100, ImageInfo(9, 6, 3, ImageFlag.PROGRESSIVE | ImageFlag.TRAILING_BYTES)),
    "WebP with corrupt EXIF": (extended_webp(chunk_of_riff(b"EXIF", SIX[:9])), ImageInfo(45, 34, 3, ImageFlag.WEBP | ImageFlag.CORRUPT_EXIF)),
    "BMP of the oldest header, in colour": (CORE_BMP, ImageInfo(5, 4, 3, ImageFlag.BMP)),
    "PNG": (encoded(pixels(6, 9, 3), ".png"), ImageInfo(9, 6, 3, ImageFlag.PNG)),
    "PNG with alpha": (encoded(pixels(6, 9, 4), ".png"), ImageInfo(9, 6, 4, ImageFlag.PNG)),
    "gray PNG with alpha": (png(9, 6, 4), ImageInfo(9, 6, 2, ImageFlag.PNG)),
    "PNG with a palette": (png(9, 6, 3, chunk(b"PLTE", bytes(6))), ImageInfo(9, 6, 3, ImageFlag.PNG)),
}  # fmt: skip
"""Other files by name, most of them JPEG or PNG, and what their headers say."""


@pytest.mark.parametrize(("image", "info"), (KINDS | COMMON).values(), ids=KINDS | COMMON)
def test_a_header_says_what_the_decoder_makes_of_it(image: bytes, info: ImageInfo) -> None:
    assert read_image_header(image) == read_image_header(memoryview(image)) == info
    for orientation in ("ignore", "apply"):
        is_turned = orientation == "apply" and info.orientation >= 5
        size = (info.width, info.height) if is_turned else (info.height, info.width)
        assert decode_rgb(image, orientation=orientation).shape == (*size, 3)  # type: ignore[arg-type]


LOSS = {"alpha.tiff": 60, "colour.gif": 80, "animated.gif": 80, "colour.jp2": 60, "bare.j2k": 60}
STARTS = ("colour.", "lossless", "lossy", "lzw", "deflate", "jpeg", "deep-colour", "bare", "animated")
NEAR = [name for name in KINDS if name.startswith(STARTS) or name in ("deep.ppm", "deep.avif", "pages.tiff")]


@pytest.mark.parametrize("name", [*NEAR, "alpha.avif", "alpha.webp", "alpha.bmp", "alpha.tiff"])
def test_the_pixels_are_those_that_were_encoded(name: str) -> None:
    """Within what lossy formats lose, and where alpha is not nearly transparent."""
    pixels = decode_rgb(KINDS[name][0])[:, 38:40, ::-1].astype(int)

    assert np.abs(pixels - COLOUR[:, 38:40]).max() <= LOSS.get(name, 25)


@pytest.mark.parametrize("name", sorted({*KINDS, *COMMON} - TEXT_OR_PADDED))
def test_an_image_cut_anywhere_is_refused(name: str) -> None:
    image, _ = (KINDS | COMMON)[name]
    step = 1 + len(image) // (100 if name in KINDS else 1000)

    for size in sorted({*range(0, len(image), step), len(image) - 1}):
        with pytest.raises(BadImage):
            read_image_header(image[:size])
    with pytest.raises(BadImage, match=r"^does not decode$"):
        decode_rgb(image[:0])


TRAILING = [
    name for name in KINDS if not name.endswith((".tiff", ".tif", ".avif")) and not name.startswith("plain")
]


@pytest.mark.parametrize("name", TRAILING)
def test_trailing_bytes_are_noted(name: str) -> None:
    image, info = KINDS[name]

    assert read_image_header(image + b"junk").flags == info.flags | (
        ImageFlag(0) if name.endswith(".jp2") else ImageFlag.TRAILING_BYTES
    )


def named(brand: bytes) -> bytes:
    return b"\0\0\0\x18ftyp" + brand + bytes(4) + brand + b"mif1" + bytes(90)


UNUSUAL = "a truncated, damaged or unusual .*, which OpenCV does not decode: convert it to PNG or JPEG$"
REFUSED = {
    "HEIC": (named(b"heic"), "^HEIC, which OpenCV does not decode: convert it to PNG or JPEG$"),
    "HEIF of mif1": (named(b"mif1"), "^HEIC, which OpenCV does not decode"),
    "MP4": (b"\0\0\0\x18ftypmp42" + bytes(90), "not an image .*mp42"),
    "WebP of a header": (b"RIFF\x0c\0\0\0WEBPVP8X" + bytes(4), "truncated: the file ends within"),
    "WAV": (b"RIFF\x24\0\0\0WAVEfmt ", "not an image .*WAVE"),
    "JPEG XL": (b"\xff\x0a" + bytes(9), "^JPEG XL, which"),
    "JPEG XL in boxes": (b"\0\0\0\x0cJXL \r\n\x87\n" + bytes(9), "^JPEG XL, which"),
    "OpenEXR": (b"v/1\1" + bytes(9), "^OpenEXR, which OpenCV does not decode"),
    "PSD": (b"8BPS\0\1", "^PSD, which"),
    "SVG": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "^SVG, which"),
    "Radiance HDR": (encoded(COLOUR.astype(np.float32), ".hdr"), "^Radiance HDR, which OpenCV decodes to wrong pixels"),
    "PFM": (encoded(COLOUR.astype(np.float32), ".pfm"), "^PFM, which OpenCV decodes to wrong pixels"),
    "PAM": (encoded(COLOUR, ".pam"), "^PAM, which OpenCV decodes to wrong pixels"),
    "an empty file": (b"", r"^not an image \(empty\)"),
    "Git LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00", r"^not an image \(a pointer of Git LFS"),
    "text": (b"not found\n", r"^not an image \(starts with 6e 6f 74"),
    "TIFF of floats": (encoded(COLOUR.astype(np.float32), ".tiff"), "a TIFF of 3 x 32 bits, sample format 3"),
    "TIFF of Zstandard": (raw_tiff(**{"259": 50000}), "TIFF with compression 50000, which OpenCV does not decode"),
    "TIFF of JPEG 2000, which OpenCV makes black": (raw_tiff(**{"259": 34712}), "TIFF with compression 34712"),
    "DICOM": (bytes(128) + b"DICM", "^DICOM, which"),
    "FITS": (b"SIMPLE  =                    T", "^FITS, which"),
    "TIFF without its palette": (raw_tiff(**{"320": 0}).replace(struct.pack("<HHII", 320, 4, 1, 0), struct.pack("<HHII", 320, 3, 768, 10**6)), "truncated"),
    "TIFF of 12 bits": (raw_tiff(**{"258": 12}), "12 bits"),
    "TIFF of signed samples": (raw_tiff(**{"339": 2}), "format 2"),
    "TIFF of 16 bits in gray tiles": (
        raw_tiff(**{"258": 16, "273": None, "279": None, "322": 32, "323": 32, "324": 8, "325": 8}), "gray tiles, which OpenCV decodes to wrong pixels",
    ),
    "PGM of 4 bits": (b"P5\n3 2\n15\n123456", "values up to 15, which OpenCV decodes to wrong pixels"),
    "BMP of unusual masks": (bmp(32, packing=3, rest=struct.pack("<3I", 255, 255 << 8, 255 << 16)), "unusual colour masks, which OpenCV decodes to wrong"),
    "JPEG without loss": (skeleton(frame(9, 6, marker=0xC3), scan()), "lossless, hierarchical or of more than 8 bits, which"),
    "JPEG of 12 bits": (skeleton(frame(9, 6).replace(b"\x08", b"\x0c", 1), scan()), "or of more than 8 bits, which OpenCV does not"),
    "BMP of JPEG": (bmp(24, packing=4), UNUSUAL),
    "JPEG 2000 of CMYK": (JP2.replace(b"colr\1\0\0\0\0\0\x10", b"colr\1\0\0\0\0\0\x0c"), "not sRGB or gray"),
    "JPEG 2000 of 12 bits": (JP2.replace(b"\7\1\1\7\1\1\7\1\1", b"\x0b\1\1" * 3), "8 or 16 bits"),
    "JPEG 2000 whose download broke off": (JP2[: len(JP2) // 2] + bytes(len(JP2) // 2), "truncated"),
    "JPEG 2000 in subsamples": (JP2.replace(b"\7\1\1\7\1\1\7\1\1", b"\7\1\1\7\2\2\7\2\2"), UNUSUAL),
    "Sun raster in RGB": (encoded(COLOUR, ".sr").replace(b"\0\0\0\1\0\0\0\0", b"\0\0\0\3\0\0\0\0", 1), UNUSUAL),
}  # fmt: skip


def gif(*blocks: bytes, width: int = 3, height: int = 2) -> bytes:
    return b"GIF89a" + struct.pack("<HHBBB", width, height, 0, 0, 0) + b"".join(blocks) + b";"


FRAME = b"," + struct.pack("<HHHHB", 0, 0, 3, 2, 0) + b"\2\2\x44\1\0"
HOSTILE = {
    "TIFF of pages in a circle": (raw_tiff()[: -GRAY.size - 4] + struct.pack("<I", 8) + raw_tiff()[-GRAY.size :], "in a circle"),
    "TIFF of huge tiles": (raw_tiff(**{"273": None, "279": None, "322": 1 << 31, "323": 1 << 31, "324": 8, "325": 8}), "too large: a TIFF with tiles"),
    "TIFF bomb": (raw_tiff(**{"256": 1 << 20, "257": 1 << 20}), "too large"),
    "WebP bomb": (extended_webp(width=1 << 14, height=1 << 14), "differ in size|too large"),
    "WebP of a canvas of another size": (extended_webp(width=46), "image and canvas differ"),
    "WebP of too many chunks": (webp(LOSSLESS[12:12], *[chunk_of_riff(b"VP8X", bytes(10))] * (MAX_CHUNKS + 1)), "chunks"),
    "WebP with a chunk that does not fit": (LOSSLESS[:16] + b"\xff\xff" + LOSSLESS[18:], "does not fit"),
    "GIF bomb": (gif(FRAME, width=65535, height=65535), "too large"),
    "BMP bomb": (bmp(8, packing=1)[:18] + struct.pack("<ii", 1 << 20, 1 << 20) + bmp(8, packing=1)[26:], "too large|truncated"),
    "PPM bomb": (b"P6 999999999 999999999 255\n", "too large"),
    "PPM of a word": (b"P6 3 two 255\n", "without the numbers"),
    "JPEG 2000 bomb": (codestream(JP2)[:8] + struct.pack(">II", 1 << 20, 1 << 20) + codestream(JP2)[16:], UNUSUAL),
    "JP2 without a codestream": (JP2[: JP2.index(b"jp2c") - 4], "without a codestream"),
    "AVIF bomb": (KINDS["colour.avif"][0].replace(struct.pack(">II", 45, 34), b"\0\1\0\0" * 2), UNUSUAL),
    "Sun raster bomb": (encoded(COLOUR, ".sr")[:4] + struct.pack(">II", 1 << 31, 1 << 31) + bytes(24), UNUSUAL),
}  # fmt: skip


@pytest.mark.slow
def test_a_dataset_of_every_kind_is_intact_and_untrue_kinds_are_found(tmp_path: Path) -> None:
    for at, (name, (image, _)) in enumerate(sorted(KINDS.items())):
        write(tmp_path / "source" / f"class{at % 2}" / name, image)
    converted(tmp_path / "source", tmp_path / "out", decode_check=True)

    for level in LEVELS:
        report = verify(tmp_path / "out", level=level)
        assert (report.findings, report.unchecked) == ([], [])
    reseal(tmp_path / "out", lambda manifest: manifest.update(kinds=["TIFF"]))
    (finding,) = verify(tmp_path / "out", level="records").findings
    assert "its kinds are TIFF, but the records have " in finding.problem


HARMFUL: dict[str, tuple[bytes, str]] = {
    "JPEG bomb": (skeleton(frame(30_000, 30_000), scan()), "more than"),
    "PNG bomb": (png_head(1 << 16, 1 << 16, 2) + PNG[len(png_head(9, 6, 2)) :], "more than"),
    "PNG of another width": (PNG[:16] + b"\0\1\0\0" + PNG[20:], "CRC"),
    "one column too many": (png(1_000_001, 1, 0), "a side of more than 1,000,000 pixels"),
    "one column too many for libjpeg": (skeleton(frame(65_501, 9), scan()), "a side of more than 65,500 pixels"),
    "one row too many": (skeleton(frame(1 << 13, (1 << 13) + 1), scan()), "more than"),
    "no width": (skeleton(frame(0, 9), scan()), "0x9 pixels"),
    "progressive scan bomb": (skeleton(frame(9, 6, marker=0xC2), *[scan(1)] * 1_000_000), "scans"),
    "fill bytes without end": (b"\xff\xd8" + b"\xff" * 20_000 + JPEG[2:], "more than 10000 markers"),
    "two components": (skeleton(frame(9, 6, 2), scan()), "2 components"),
    "short frame": (skeleton(segment(0xC0, b"\x08\0\x06\0\x09"), scan()), "too short"),
    "no frame": (skeleton(scan()), "without a frame"),
    "no scan": (skeleton(frame(9, 6)) + bytes(9), "before any scan"),
    "two beginnings": (b"\xff\xd8" + JPEG, "before any scan"),
    "no marker": (JPEG[:2] + b"\xff\xe0\0\4ab" + b"cd" + JPEG[2:], "not a JPEG marker"),
    "empty scan header at the end": (skeleton(frame(9, 6))[:-2] + b"\xff\xda\0\2", "without"),
    **{f"segment of {n} bytes": (JPEG[:2] + b"\xff\xe0" + n.to_bytes(2) + JPEG[2:], "does not fit") for n in (1, 0xFFFF)},
    "unknown colour type": (png(9, 6, 5), "unknown colour type 5"),
    "PNG without header": (PNG[:8] + PNG[33:], "without its header"),
    **{f"PNG without {n} bytes of its end": (PNG[:-n], "truncated: the PNG has no end") for n in (12, 20)},
}  # fmt: skip


@pytest.mark.parametrize("name", [*REFUSED, *HOSTILE, *HARMFUL])
def test_what_would_harm_a_decoder_or_is_not_decoded_to_its_pixels_is_refused(name: str) -> None:
    image, message = (REFUSED | HOSTILE | HARMFUL)[name]
    with memory_below(16 << 20), pytest.raises(BadImage, match=message):
        read_image_header(image)


def test_bytes_that_trip_the_reader_of_images_are_a_bad_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(READERS, jpeg.JPEG_SIGNATURE, {}.pop)
    with pytest.raises(BadImage, match=r"cannot be read \(KeyError: ") as caught:
        read_image_header(b"\xff\xd8\xff")
    assert isinstance(caught.value.__cause__, KeyError)
