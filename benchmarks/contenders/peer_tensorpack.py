"""tensorpack's MultiProcessMapDataZMQ: workers get file names and return pixels for batches."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.modules["tensorflow"] = None  # type: ignore[assignment]  # its workers, forked after TensorFlow, may hang

import cv2  # noqa: E402
import numpy as np  # noqa: E402
from measuring.data import Data  # noqa: E402
from tensorpack.dataflow import BatchData, DataFromList, MultiProcessMapDataZMQ  # noqa: E402

from shardprep.formats.records.record import Record  # noqa: E402
from shardprep.loaders import TrainTransform  # noqa: E402


def files(data: Data) -> Iterator[int]:
    cv2.setNumThreads(0)
    transform, rng = TrainTransform(data.size), np.random.default_rng()

    def load(point: tuple[Path, int]) -> list[Any]:
        path, label = point
        return [transform(Record(path.name, label, path.read_bytes()), rng), label]

    source = DataFromList(data.files(), shuffle=True)
    mapped = MultiProcessMapDataZMQ(source, num_proc=data.workers, map_func=load, buffer_size=512)
    flow = BatchData(mapped, data.batch)
    flow.reset_state()
    while True:
        for images, _ in flow:
            yield len(images)
