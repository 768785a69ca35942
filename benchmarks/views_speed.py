"""CPU time of several views of each image: one by one, and together as ``Views`` makes them.

    python benchmarks/images.py /tmp/images --count 500
    python benchmarks/views_speed.py /tmp/images /tmp/scratch [--count 150] [--rounds 5]

Each contender makes all views of the same encoded images in memory, in one process with one thread; rounds
alternate. Milliseconds of CPU for a record are medians, and the factor is the median of each round's. With
torchvision, DINO's own way is there, too: one decode by Pillow, then torchvision's v2 crops of the image.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from measuring.conditions import conditions
from measuring.data import Data, prepare

from shardprep import TrainTransform, Views, open_dataset
from shardprep.loaders.order.rng import RecordRandom

BIG, SMALL = TrainTransform(224, scale=(0.32, 1.0)), TrainTransform(96, scale=(0.05, 0.32))
Way = Callable[[int, Any], object]
FORMS: dict[str, list[TrainTransform]] = {
    "2 x 224": [TrainTransform(224)] * 2,
    "4 x 224": [TrainTransform(224)] * 4,
    "2 x 224 + 8 x 96": [BIG] * 2 + [SMALL] * 8,
}


def with_torchvision(views: list[TrainTransform]) -> Way:
    """DINO's data path: Pillow decodes, and each view is a RandomResizedCrop and a flip of the image."""
    import torch
    from PIL import Image
    from torchvision.transforms import v2

    torch.set_num_threads(1)
    crops = [
        v2.Compose([v2.RandomResizedCrop(view.size, view.scale, interpolation=3), v2.RandomHorizontalFlip()])
        for view in views
    ]

    def call(number: int, record: Any) -> object:
        image = Image.open(io.BytesIO(record.image)).convert("RGB")
        return [np.asarray(crop(image)) for crop in crops]

    return call


def contenders(views: list[TrainTransform]) -> dict[str, Way]:
    """The ways to make the views of one record."""
    random, alone = RecordRandom(0), RecordRandom(0)
    together = Views(views)
    out = [np.empty(spec.shape, spec.dtype) for spec in together.outputs]

    def one_by_one(number: int, record: Any) -> None:
        for epoch, view in enumerate(views):
            view(record, alone(epoch, number))

    found: dict[str, Way] = {
        "one by one": one_by_one,
        "Views": lambda number, record: together.fill(record, random(0, number), *out),
    }
    if importlib.util.find_spec("torchvision"):
        found["Pillow, torchvision"] = with_torchvision(views)
    return found


def main() -> None:
    """Measure every form on plain and on crop-ready shards, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("images", type=Path)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    cv2.setNumThreads(1)
    data = Data(chosen.images, chosen.scratch)
    print(conditions("numpy", "opencv-python-headless"), f"{prepare(data):,} bytes an image", sep="\n")
    for shards in (data.lmdb, data.crop_ready):
        with open_dataset(shards) as dataset:
            records = [dataset[number] for number in range(min(chosen.count, len(dataset)))]
            for form, views in FORMS.items():
                _print(f"{shards.name}, {form}", contenders(views), records, chosen.rounds)


def _print(title: str, ways: dict[str, Way], records: list[Any], rounds: int) -> None:
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            began = time.process_time()
            for number, record in enumerate(records):
                way(number, record)
            spent[name].append((time.process_time() - began) / len(records) * 1e3)
    print(f"\n{title}")
    for name, times in spent.items():
        factor = statistics.median(a / b for a, b in zip(spent["one by one"], times, strict=True))
        print(f"  {name:<22}{statistics.median(times):6.2f} ms{factor:6.2f} x")


if __name__ == "__main__":
    main()
