"""SPDL's pipeline of threads on single files: with this package's transform, and with its own decoder.

    pip install spdl-core spdl-io

spdl-io decodes, crops and scales by FFmpeg, whose libraries the system must have (on Debian:
``apt-get install libavfilter-dev libavdevice-dev``). As many threads work as other loaders have workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
from measuring.data import Data
from spdl.pipeline import PipelineBuilder

from shardprep import TrainTransform
from shardprep.formats import read_image_header
from shardprep.formats.records.record import Record
from shardprep.loaders.transforms.transforms import CROP_DRAWS, random_crop

Sample = tuple[npt.NDArray[np.uint8], int]
PREFETCHED = 3  # batches that wait for the consumer


def transformed(data: Data) -> Iterator[int]:
    """Return the batches that this package's transform makes in threads."""
    transform, generator = TrainTransform(data.size), np.random.default_rng(0)
    cv2.setNumThreads(0)

    def load(item: tuple[Path, int]) -> Sample:
        path, label = item
        rng = np.random.default_rng(generator.integers(1 << 62))
        return transform(Record(path.name, label, path.read_bytes()), rng), label

    return _batches(data, load)


def ffmpeg(data: Data) -> Iterator[int]:
    """Return the batches that FFmpeg decodes, crops, scales and flips in threads."""
    import spdl.io

    random = Random(0)

    def load(item: tuple[Path, int]) -> Sample:
        path, label = item
        image = path.read_bytes()
        header = read_image_header(image)
        draws = [random.random() for _ in range(CROP_DRAWS)]
        x, y, w, h = random_crop(
            header.width, header.height, scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3), draws=draws
        )
        steps = [f"crop={w}:{h}:{x}:{y}:exact=1", f"scale={data.size}:{data.size}:flags=bilinear"]
        steps += ["hflip"] * (random.random() < 0.5)
        pixels = spdl.io.load_image(image, filter_desc=",".join([*steps, "format=pix_fmts=rgb24"]))
        return spdl.io.to_numpy(pixels), label

    return _batches(data, load)


def _batches(data: Data, load: Callable[[tuple[Path, int]], Sample]) -> Iterator[int]:
    def stacked(samples: list[Sample]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        return np.stack([pixels for pixels, _ in samples]), np.array([label for _, label in samples])

    def epochs() -> Iterator[Any]:
        files, random = data.files(), Random(0)
        while True:
            random.shuffle(files)
            yield from files

    builder = PipelineBuilder().add_source(epochs()).pipe(load, concurrency=data.workers)
    builder = builder.aggregate(data.batch, drop_last=True).pipe(stacked).add_sink(PREFETCHED)
    pipeline = builder.build(num_threads=data.workers + 1)  # one more stacks
    with pipeline.auto_stop():
        for images, _ in pipeline:
            yield len(images)
