"""The faster decoder of JPEGs, which must make the pixels of OpenCV, and decide nothing else."""

from __future__ import annotations

import sys
from random import Random
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
import simplejpeg
from hypothesis import given, strategies as st

from shardprep.formats.errors import BadImage
from shardprep.formats.images import fast
from shardprep.loaders import decode_rgb
from shardprep.loaders.transforms import decode as decoding
from support.image_files import PHOTOGRAPHS, encoded
from support.mutations import mutated


def both(image: bytes, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What becomes of an image with the faster decoder and without: its pixels, or None for a bad one."""
    found: list[Any] = []
    for decoder in (fast.jpeg_decoder(), None):
        monkeypatch.setattr(decoding, "jpeg_decoder", lambda decoder=decoder: decoder)
        try:
            found.append(decode_rgb(image))
        except BadImage:
            found.append(None)
    return found


@given(
    sides=st.tuples(st.integers(1, 90), st.integers(1, 90)),
    channels=st.sampled_from([1, 3]),
    quality=st.integers(1, 100),
    sampling=st.sampled_from([0x411111, 0x111111, 0x211111, 0x121111, 0x221111]),
    restart=st.integers(0, 9),
    progressive=st.booleans(),
    seed=st.integers(0, 9),
)
def test_its_pixels_are_those_of_opencv(
    sides: tuple[int, int],
    channels: int,
    quality: int,
    sampling: int,
    restart: int,
    progressive: bool,
    seed: int,
) -> None:
    noise = np.random.default_rng(seed).integers(0, 256, (*sides, channels), np.uint8)
    image = encoded(
        cv2.GaussianBlur(noise, (0, 0), 1 + seed),
        ".jpg",
        *(cv2.IMWRITE_JPEG_QUALITY, quality, cv2.IMWRITE_JPEG_SAMPLING_FACTOR, sampling),
        *(cv2.IMWRITE_JPEG_RST_INTERVAL, restart, cv2.IMWRITE_JPEG_PROGRESSIVE, int(progressive)),
    )

    with pytest.MonkeyPatch.context() as patched:
        quick, slow = both(image, patched)

    assert fast.jpeg_decoder() is not None
    assert np.array_equal(quick, slow)
    assert np.array_equal(quick, simplejpeg.decode_jpeg(image, fastdct=False, fastupsample=False))


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_image_is_what_opencv_makes_of_it(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = Random(seed)
    for _ in range(10):
        image = mutated(PHOTOGRAPHS[rng.randrange(len(PHOTOGRAPHS))].read_bytes(), rng)
        quick, slow = both(image, monkeypatch)
        assert np.array_equal(quick, slow), (seed, len(image))


def other_pixels(image: bytes, **options: Any) -> Any:
    return simplejpeg.decode_jpeg(image, **options) ^ np.uint8(1)


def refused(image: bytes, **options: Any) -> Any:
    raise ValueError("no")


@pytest.mark.parametrize(
    "module",
    [None, SimpleNamespace(decode_jpeg=other_pixels), SimpleNamespace(decode_jpeg=refused)],
    ids=["missing", "other pixels", "refused"],
)
def test_it_is_not_used_where_it_is_missing_or_makes_other_pixels(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "simplejpeg", module)

    assert fast.jpeg_decoder.__wrapped__() is None
