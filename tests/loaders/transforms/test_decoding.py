"""Every kind of image is decoded to RGB, or raises BadImage."""

from __future__ import annotations

import os
import subprocess
import sys

import cv2
import numpy as np
import pytest

from shardprep.formats.errors import BadImage
from shardprep.formats.images.opencv import require_opencv
from shardprep.loaders.transforms.decode import decode_rgb
from support.pictures import cmyk_jpeg, photograph, png, with_orientation

COLOURS = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_a_jpeg_becomes_rgb_from_any_kind_of_bytes(kind):
    pixels = decode_rgb(kind(photograph("coffee.jpg")))

    expected = cv2.imdecode(np.frombuffer(photograph("coffee.jpg"), np.uint8), cv2.IMREAD_COLOR)
    np.testing.assert_array_equal(pixels, expected[..., ::-1])
    assert pixels.dtype == np.uint8
    assert pixels.flags.c_contiguous
    assert pixels.flags.writeable


def test_a_png_becomes_rgb_and_its_transparency_is_dropped():
    transparent = np.dstack([COLOURS, np.full((5, 7), 128, np.uint8)])

    np.testing.assert_array_equal(decode_rgb(png(COLOURS)), COLOURS[..., ::-1])
    np.testing.assert_array_equal(decode_rgb(png(transparent)), COLOURS[..., ::-1])


@pytest.mark.parametrize("image", [photograph("camera-gray.jpg"), png(COLOURS[..., 0].copy())])
def test_gray_becomes_three_equal_channels(image):
    pixels = decode_rgb(image)

    assert pixels.shape[2] == 3
    assert np.all(pixels == pixels[..., :1])


def test_cmyk_becomes_rgb():
    pixels = decode_rgb(cmyk_jpeg())

    assert pixels.shape == (8, 8, 3)
    assert np.all(np.abs(pixels.astype(int) - 64) <= 1)


def test_a_single_pixel_is_an_image():
    assert decode_rgb(png(np.zeros((1, 1, 3), np.uint8))).shape == (1, 1, 3)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_ignored_unless_it_is_asked_for(orientation):
    upright = photograph("coffee.jpg")
    pixels = decode_rgb(upright)
    turned = with_orientation(upright, orientation)
    flip = {2: 1, 3: -1, 4: 0, 5: None, 6: 1, 7: -1, 8: 0}  # orientations 5 to 8 also transpose

    expected = cv2.transpose(pixels) if orientation >= 5 else pixels
    if flip.get(orientation) is not None:
        expected = cv2.flip(expected, flip[orientation])
    np.testing.assert_array_equal(decode_rgb(turned), pixels)
    np.testing.assert_array_equal(decode_rgb(turned, orientation="apply"), expected)


@pytest.mark.parametrize(
    "image",
    [b"", b"not an image", photograph("coffee.jpg")[:20_000], png(COLOURS)[:40]],
    ids=["empty", "text", "truncated jpeg", "truncated png"],
)
def test_what_does_not_decode_is_a_bad_image_with_its_key(image):
    with pytest.raises(BadImage, match="n01440764_1: does not decode") as caught:
        decode_rgb(image, key="n01440764_1")

    assert caught.value.key == "n01440764_1"


def test_an_image_of_too_many_pixels_is_refused_before_its_memory_is_taken():
    huge = bytearray(png(np.zeros((1, 1, 3), np.uint8)))
    huge[16:24] = (30_000).to_bytes(4, "big") * 2

    with pytest.raises(BadImage):
        decode_rgb(huge)


@pytest.mark.slow
@pytest.mark.parametrize(("given", "expected"), [(None, str(1 << 26)), ("1000", "1000")])
def test_the_limit_of_pixels_is_set_before_opencv_reads_it_unless_the_user_did(given, expected):
    environ = {k: v for k, v in os.environ.items() if k != "OPENCV_IO_MAX_IMAGE_PIXELS"}
    if given:
        environ["OPENCV_IO_MAX_IMAGE_PIXELS"] = given
    code = "import os, shardprep.loaders.transforms.decode; print(os.environ['OPENCV_IO_MAX_IMAGE_PIXELS'])"

    printed = subprocess.check_output([sys.executable, "-c", code], env=environ, text=True)

    assert printed.strip() == expected


@pytest.mark.parametrize("version", ["4.11.0", "4.8.1.78", "3.4"])
def test_an_opencv_that_accepts_truncated_images_is_refused(version):
    with pytest.raises(ImportError, match=r"install opencv-python-headless 4\.12"):
        require_opencv(version)


@pytest.mark.parametrize("version", ["4.12.0", "5.0.0", "4.13.0-dev", "10.0"])
def test_newer_opencv_is_accepted(version):
    require_opencv(version)


@pytest.mark.slow
def test_no_room_for_the_pixels_says_nothing_of_the_image() -> None:
    script = """
import resource
import numpy as np
from shardprep.formats.images.decode import check_decodes
from shardprep.formats.images.decode import decode; from shardprep.formats.images.opencv import cv2

image = cv2.imencode(".jpg", np.zeros((6000, 6000, 3), np.uint8))[1].tobytes()
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (64 << 20),) * 2)
try:
    check_decodes(image)
except MemoryError as error:
    print(error)
"""

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)

    assert (done.stdout, done.stderr) == ("there is no room for an image's pixels\n", "")
