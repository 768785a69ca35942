"""Images like ImageNet's, made from the sample photographs: about 110 KB each, about 480x400.

    python benchmarks/images.py FOLDER --count 2000

writes FOLDER/classNN/NNNNNN.jpg: crops of 25 photographs, enlarged, with a little grain, so that the
encoded data are as dense as ImageNet's (4.5 bits per pixel).
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import cv2
import numpy as np

PHOTOGRAPHS = sorted((Path(__file__).parent.parent / "formats" / "data" / "photographs").glob("*.jpg"))
CLASSES = 20


def make_image(folder: Path, number: int) -> int:
    """Write one image; return its size in bytes."""
    rng = np.random.default_rng(number)
    photograph = cv2.imread(str(PHOTOGRAPHS[number % len(PHOTOGRAPHS)]))
    height, width = photograph.shape[:2]
    scale = rng.uniform(0.6, 1.0)
    crop_h, crop_w = int(height * scale), int(width * scale)
    y, x = rng.integers(0, height - crop_h + 1), rng.integers(0, width - crop_w + 1)
    target = (int(rng.normal(480, 40)), int(rng.normal(400, 40)))
    image = cv2.resize(photograph[y : y + crop_h, x : x + crop_w], target, interpolation=cv2.INTER_CUBIC)
    grain = rng.normal(0, 7, image.shape).astype(np.float32)
    image = np.clip(image + grain, 0, 255).astype(np.uint8)
    data = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, 96])[1].tobytes()
    (folder / f"class{number % CLASSES:02d}" / f"{number:06d}.jpg").write_bytes(data)
    return len(data)


def make_images(folder: Path, count: int) -> int:
    """Write ``count`` images in class folders; return their size in bytes."""
    for label in range(CLASSES):
        (folder / f"class{label:02d}").mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor() as pool:
        return sum(pool.map(partial(make_image, folder), range(count), chunksize=64))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=2000)
    arguments = parser.parse_args()
    size = make_images(arguments.folder, arguments.count)
    print(f"{arguments.count} images, mean {size / arguments.count / 1000:.1f} KB")
