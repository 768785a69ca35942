"""JPEG files of the size and variety of ImageNet's, made from a few photographs."""

from __future__ import annotations

from importlib import resources

import numpy as np
import numpy.typing as npt

from shardprep.formats.images.opencv import cv2

PER_PHOTOGRAPH = 2
MEAN_BYTES = 110_000
SPREAD = 0.55  # standard deviation of the logarithm of a file's size
BYTES_PER_PIXEL = 0.57  # of these crops with this grain at this quality
GRAIN, QUALITY = 7, 96
ASPECTS = (4 / 3, 4 / 3, 3 / 4, 1.0)

Pixels = npt.NDArray[np.uint8]


def fake_files(seed: int) -> list[bytes]:
    """Make fifty JPEG files, 110 KB on average. Deterministic for equal releases of OpenCV and NumPy."""
    rng = np.random.default_rng(seed)
    photographs = _photographs()
    count = PER_PHOTOGRAPH * len(photographs)
    sizes = np.exp(SPREAD * rng.standard_normal(count))
    pixels = sizes / sizes.mean() * MEAN_BYTES / BYTES_PER_PIXEL
    return [_file(photographs[n % len(photographs)], area, rng) for n, area in enumerate(pixels.tolist())]


def _photographs() -> list[Pixels]:
    """The photographs of the sample dataset, without the CMYK one."""
    folder = resources.files("shardprep.formats.sources.sample.photographs")
    names = sorted(p.name for p in folder.iterdir() if p.name.endswith(".jpg"))
    files = [np.frombuffer((folder / name).read_bytes(), np.uint8) for name in names if name != "cmyk.jpg"]
    return [cv2.imdecode(file, cv2.IMREAD_COLOR) for file in files]  # type: ignore[misc]


def _file(photograph: Pixels, area: float, rng: np.random.Generator) -> bytes:
    aspect = ASPECTS[rng.integers(len(ASPECTS))]
    target = round((area * aspect) ** 0.5), round((area / aspect) ** 0.5)
    image = cv2.resize(_crop(photograph, rng), target, interpolation=cv2.INTER_CUBIC)
    grain = GRAIN * rng.standard_normal(image.shape, np.float32)
    noisy = np.clip(image + grain, 0, 255).astype(np.uint8)
    return cv2.imencode(".jpg", noisy, [cv2.IMWRITE_JPEG_QUALITY, QUALITY])[1].tobytes()


def _crop(photograph: Pixels, rng: np.random.Generator) -> Pixels:
    """A random crop of 60 to 100 % of each side."""
    height, width = (round(side * rng.uniform(0.6, 1.0)) for side in photograph.shape[:2])
    y, x = rng.integers(photograph.shape[0] - height + 1), rng.integers(photograph.shape[1] - width + 1)
    return photograph[y : y + height, x : x + width]
