"""This project's contenders: the plain loop on one core, and the loader."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import numpy.typing as npt
from measuring.data import Data, prepare_small

from shardprep.formats import open_dataset
from shardprep.loaders import (
    ArraySpec,
    EvalTransform,
    Loader,
    LocalShuffle,
    TrainTransform,
    Transform,
    TransformInput,
    decode_rgb,
)
from shardprep.loaders.loader.loader import DEFAULT_SLOTS
from shardprep.loaders.order.rng import RecordRandom
from shardprep.loaders.transforms.transforms import CROP_DRAWS, random_crop

WINDOW = 1000


@dataclass(frozen=True)
class Constant:
    """A transform that writes one value: the rest of a loader's cost is reading and transport."""

    size: int

    @property
    def outputs(self) -> tuple[ArraySpec, ...]:
        return (ArraySpec("image", (self.size, self.size, 3), "uint8"),)

    def __call__(self, record: TransformInput, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
        return np.full((self.size, self.size, 3), 127, np.uint8)

    def fill(self, record: TransformInput, rng: np.random.Generator, out: npt.NDArray[np.uint8]) -> None:
        out[...] = 127


@dataclass(frozen=True)
class WholeImage(TrainTransform):
    """The training transform of 0.1: whole images are decoded, and large crops averaged from all pixels."""

    def fill(self, record: TransformInput, rng: np.random.Generator, out: npt.NDArray[np.uint8]) -> None:
        pixels = decode_rgb(record.image, key=record.key)
        coin, *draws = rng.random(1 + CROP_DRAWS).tolist()
        height, width = pixels.shape[:2]
        x, y, w, h = random_crop(width, height, scale=self.scale, ratio=self.ratio, draws=draws)
        method = cv2.INTER_AREA if w * h >= 4 * self.size**2 else cv2.INTER_LINEAR
        crop = pixels[y : y + h, x : x + w]
        cv2.resize(crop, (self.size, self.size), dst=out, interpolation=method)
        if coin < 0.5:
            cv2.flip(out, 1, dst=out)


def one_core(data: Data) -> Iterator[int]:
    """Decode, crop, resize and flip records in memory, in one thread, into one array."""
    with open_dataset(data.lmdb) as dataset:
        records = [dataset[number] for number in range(len(dataset))]
    cv2.setNumThreads(0)
    transform, random = TrainTransform(data.size), RecordRandom(0)
    out = np.empty((data.size, data.size, 3), np.uint8)
    for epoch in itertools.count():
        for number, record in enumerate(records):
            transform.fill(record, random(epoch, number), out)
            yield 1


def read_and_fill(data: Data) -> Iterator[int]:
    """Read records and fill rows of batches with a constant, in one thread: the loader without transport.

    There are as many batches as the loader has slots, so that their memory is not in the CPU's caches.
    """
    transform, random = Constant(data.size), RecordRandom(0)
    rows = np.ones((DEFAULT_SLOTS * data.batch, data.size, data.size, 3), np.uint8)
    with open_dataset(data.lmdb) as dataset:
        for place in itertools.count():
            epoch, number = divmod(place, len(dataset))
            transform.fill(dataset[number], random(epoch, number), rows[place % len(rows)])
            yield 1


def loader_lmdb(data: Data) -> Iterator[int]:
    return _batches(data.lmdb, data, TrainTransform(data.size))


def loader_whole(data: Data) -> Iterator[int]:
    return _batches(data.lmdb, data, WholeImage(data.size))


def loader_crop_ready(data: Data) -> Iterator[int]:
    return _batches(data.crop_ready, data, TrainTransform(data.size))


def loader_small(data: Data) -> Iterator[int]:
    prepare_small(data)
    return _batches(data.small, data, TrainTransform(data.size))


def eval_lmdb(data: Data) -> Iterator[int]:
    return _batches(data.lmdb, data, EvalTransform(data.size))


def eval_crop_ready(data: Data) -> Iterator[int]:
    return _batches(data.crop_ready, data, EvalTransform(data.size))


def loader_hdf5(data: Data) -> Iterator[int]:
    return _batches(data.hdf5, data, TrainTransform(data.size))


def loader_constant(data: Data) -> Iterator[int]:
    return _batches(data.lmdb, data, Constant(data.size))


def _batches(path: Path, data: Data, transform: Transform) -> Iterator[int]:
    with Loader(
        path,
        batch_size=data.batch,
        transform=transform,
        shuffle=LocalShuffle(WINDOW),
        workers=data.workers,
        rank=0,
        world_size=1,
    ) as loader:
        while True:
            for images, _ in loader:
                yield len(images)
