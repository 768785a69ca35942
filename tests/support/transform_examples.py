"""Records of every form that a transform meets: crop-ready, plain, turned, PNG and CMYK."""

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from shardprep.formats.images.crop_ready import make_crop_ready
from shardprep.formats.images.header import read_image_header
from shardprep.loaders import decode_rgb
from shardprep.loaders.order.rng import RecordRandom
from support.image_files import cmyk_jpeg, encoded, numbers_png, photograph, with_orientation


class Example(NamedTuple):
    key: str
    label: int
    image: bytes
    columns: dict[str, Any] = {}  # noqa: RUF012 - never changed
    crop_ready: bool = False


COFFEE = Example("coffee", 7, photograph("coffee.jpg"))


def rng(record: int = 0, epoch: int = 0) -> np.random.Generator:
    """The random numbers of a record of a loader with seed 1."""
    return RecordRandom(1)(epoch, record)


def example(image: bytes, *, ready: bool = False) -> Example:
    """A record with an image, a mask and boxes."""
    height, width = decode_rgb(image, orientation="ignore").shape[:2]
    mask = numbers_png(np.random.default_rng(0).integers(0, 5, (height, width), np.uint8))
    boxes = np.array([[0, 0, 1, 1], [0.1, 0.2, 0.6, 0.7], [0.8, 0.8, 0.9, 1]], np.float32)
    columns = {"mask": mask, "boxes": boxes, "kinds": np.arange(3, dtype=np.int32)}
    if ready:
        image = make_crop_ready(image, read_image_header(image))
    return Example("one", 0, image, columns, ready)


@cache
def examples() -> dict[str, Example]:
    coffee, pixels = photograph("coffee.jpg"), decode_rgb(photograph("chelsea.jpg"))[:90, :120]
    return {
        "crop-ready": example(coffee, ready=True),
        "plain": example(coffee),
        "turned": example(with_orientation(photograph("chelsea.jpg"), 6)),
        "png": example(encoded(pixels, ".png")),
        "cmyk": example(cmyk_jpeg()),
    }
