"""Shrunk images: the shorter side as wished, near the resized original, crop-ready, with their metadata."""

import hashlib

import cv2
import numpy as np
import pytest

from shardprep.formats.images.crop_ready import NotCropReady, grid_is_sound, grid_of, shrink
from shardprep.formats.images.header import read_image_header
from shardprep.loaders import decode_rgb
from support.image_files import PHOTOGRAPHS, encoded, pixels, png, segment, tiff, with_exif


def shrunk(image: bytes, shorter_side: int = 100, quality: int = 90) -> bytes:
    return shrink(image, read_image_header(image), shorter_side=shorter_side, quality=quality)


@pytest.mark.parametrize("photograph", PHOTOGRAPHS[:5], ids=lambda file: file.name)
def test_a_shrunk_photograph_is_near_the_resized_original(photograph: object) -> None:
    image = photograph.read_bytes()  # type: ignore[attr-defined]
    original = decode_rgb(image)
    height, width = original.shape[:2]

    made = shrunk(image, 200)

    small = decode_rgb(made)
    assert min(small.shape[:2]) == 200
    assert small.shape[1] / small.shape[0] == pytest.approx(width / height, rel=0.01)
    expected = cv2.resize(original, small.shape[1::-1], interpolation=cv2.INTER_AREA)
    assert cv2.PSNR(small, expected) > 30
    assert len(made) < len(image)


def test_a_shrunk_image_is_crop_ready_and_names_its_original() -> None:
    image = encoded(pixels(300, 400, 3))

    made = shrunk(image)

    grid = grid_of(made)
    assert grid is not None
    assert grid.sha256 == hashlib.sha256(image).digest()
    assert grid_is_sound(made, grid.sha256)


def test_metadata_is_kept() -> None:
    image = with_exif(encoded(pixels(300, 400, 3)), tiff("<", (0x0112, 3, 6)))
    image = image[:2] + segment(0xE2, b"ICC_PROFILE\0\1\1profile") + image[2:]

    made = shrunk(image)

    assert read_image_header(made).orientation == 6
    assert made.count(b"ICC_PROFILE\0\1\1profile") == 1


@pytest.mark.parametrize(
    ("image", "components"),
    [(encoded(pixels(300, 400)), 1), (png(300, 400, 6), 3), (png(300, 400, 2), 3)],
)
def test_gray_stays_gray_and_the_rest_is_colour(image: bytes, components: int) -> None:
    info = read_image_header(shrunk(image))

    assert (min(info.width, info.height), info.components) == (100, components)


def test_quality_decides_the_size() -> None:
    image = encoded(pixels(300, 400, 3))

    assert len(shrunk(image, quality=50)) < len(shrunk(image, quality=95))


@pytest.mark.parametrize("shape", [(100, 300, 3), (99, 99, 3)])
def test_an_image_that_is_small_already_stays_as_it_is(shape: tuple[int, ...]) -> None:
    with pytest.raises(NotCropReady, match="small enough"):
        shrunk(encoded(pixels(*shape)))


def test_equal_images_give_equal_bytes() -> None:
    image = encoded(np.ascontiguousarray(pixels(300, 400, 3)))

    assert shrunk(image) == shrunk(image)
