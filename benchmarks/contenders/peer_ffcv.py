"""FFCV on its own file of shrunk JPEGs at quality 90, in random order, from the page cache.

Its recipe for ImageNet writes half of the images as raw pixels, which need no decoding and more space; here
all are JPEGs, as for the other loaders.

FFCV 1.0.2 is built against OpenCV and libturbojpeg. On Debian, with torch for CPU or CUDA:

    apt-get install libopencv-dev libturbojpeg0-dev pkg-config g++
    pip install setuptools torch pillow numba terminaltables fastargs assertpy psutil pytorch-pfn-extras
    pip install --no-deps ffcv==1.0.2

``--no-deps`` leaves out opencv-python, which would overwrite the cv2 of opencv-python-headless. The images
are decoded whole, by the faster transform, and reduced by averaging. The first batch includes compilation.
"""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import numpy.typing as npt
from ffcv.fields import IntField, RGBImageField
from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.transforms import RandomHorizontalFlip, Squeeze, ToTensor
from ffcv.writer import DatasetWriter
from measuring.data import SHORTER_SIDE, Data, warm

LONGER_SIDE = 500  # pixels, of the recipe
EPOCH = 1 << 20  # images: an epoch begins with new memory, which would count in the short ones of few images
AHEAD = 3  # batches, FFCV's default; its memory is for two more


@dataclass
class Pixels:
    """Decoded images and labels; larger images are shrunk to ``shorter_side`` pixels."""

    files: list[tuple[Path, int]]
    shorter_side: int | None

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> tuple[npt.NDArray[np.uint8], int]:
        path, label = self.files[number]
        pixels = cv2.cvtColor(cv2.imread(str(path)), cv2.COLOR_BGR2RGB)
        ratio = (self.shorter_side or min(pixels.shape[:2])) / min(pixels.shape[:2])
        if ratio < 1:
            size = (round(pixels.shape[1] * ratio), round(pixels.shape[0] * ratio))
            pixels = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)
        return pixels, label


def longer_side(data: Data) -> Iterator[int]:
    """Return the batches from images shrunk as in FFCV's recipe, by the longer side."""
    if not data.beton.exists():
        write(data.beton, Pixels(data.files(), None), data.workers, LONGER_SIDE)
    return _batches(data.beton, data)


def small(data: Data) -> Iterator[int]:
    """Return the batches from images as small as those of the small shards."""
    if not data.beton_small.exists():
        write(data.beton_small, Pixels(data.files(), SHORTER_SIDE), data.workers, None)
    return _batches(data.beton_small, data)


def write(path: Path, pixels: Pixels, workers: int, longer_side: int | None) -> None:
    """Write the images by FFCV's writer, in as many processes as ``workers``."""
    partial = path.with_suffix(".partial")
    image = RGBImageField(write_mode="jpg", max_resolution=longer_side, jpeg_quality=90)
    writer = DatasetWriter(str(partial), {"image": image, "label": IntField()}, num_workers=workers)
    writer.from_indexed_dataset(pixels)
    for child in multiprocessing.active_children():  # the writer does not wait for their ends
        child.join()
    partial.rename(path)


def _batches(path: Path, data: Data) -> Iterator[int]:
    warm([path])
    count = len(data.files())
    decoder = RandomResizedCropRGBImageDecoder((data.size, data.size))
    loader = Loader(
        str(path),
        batch_size=data.batch,
        num_workers=data.workers,
        os_cache=True,
        order=OrderOption.RANDOM,
        batches_ahead=AHEAD,
        indices=np.tile(np.arange(count, dtype=np.uint64), -(-EPOCH // count)),
        pipelines={
            "image": [decoder, RandomHorizontalFlip(), ToTensor()],
            "label": [IntDecoder(), ToTensor(), Squeeze()],
        },
    )
    while True:
        # the first batches touch all the loader's memory, a megabyte per image, and are not measured
        for images, _ in itertools.islice(loader, AHEAD + 2, None):
            yield len(images)
