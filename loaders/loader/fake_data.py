"""Batches without a dataset, to measure the steps after a loader."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import UsageError
from shardprep.formats.images.opencv import cv2
from shardprep.loaders.batching.keras_hint import KerasHint
from shardprep.loaders.batching.spec import BatchSpec, full_batch_bytes
from shardprep.loaders.buffers.memory import ALIGNMENT, aligned

CLASSES = 1000

Labels = npt.NDArray[np.int64]


PER_PHOTOGRAPH = 2
MEAN_BYTES = 110_000
SPREAD = 0.55  # standard deviation of the logarithm of a file's size
BYTES_PER_PIXEL = 0.57  # of these crops with this grain at this quality
GRAIN, QUALITY = 7, 96
ASPECTS = (4 / 3, 4 / 3, 3 / 4, 1.0)


class FakeData(KerasHint):
    """Iterable of ``batches`` tuples of images and labels, in the form of a :class:`Loader`'s.

    Images are uint8 [B, H, W, 3] of noise, at a multiple of 64 bytes, where B is ``batch_size`` and ``size``
    is (H, W). With ``encoded`` they are a list of B memoryviews of JPEG files: crops of photographs, 110 KB
    on average, of 45 KB to 205 KB (5 to 95 %), about 480x400, regardless of ``size``. Labels are int64 [B], 0
    to 999. All are read-only. Each batch is delayed by ``seconds`` per record, in a sleep, which uses no CPU
    and takes as long on a busy machine.

    The batches are views of few records that are made beforehand from ``seed``, two batches of pixels or 50
    files, which repeat. Equal arguments make equal batches in every iteration. Several iterators may run at
    once, in any threads. Picklable, in few bytes. Raises UsageError for arguments out of range.
    """

    def __init__(
        self,
        batches: int,
        *,
        batch_size: int,
        size: tuple[int, int] = (224, 224),
        encoded: bool = False,
        seconds: float = 0.0,
        seed: int = 0,
    ) -> None:
        if batches < 0 or min(batch_size, *size) < 1 or not 0 <= seconds < math.inf or seed < 0:
            raise UsageError(
                f"batches={batches}, batch_size={batch_size}, size={size}, seconds={seconds}, seed={seed}: there "
                "must be at least 0 batches, 1 record in each, 1 pixel on each side, 0 seconds and a seed of 0"
            )
        self._options = {
            "batch_size": batch_size,
            "size": tuple(size),
            "encoded": encoded,
            "seconds": seconds,
            "seed": seed,
        }
        self._batches = batches
        self._rows = batch_size
        self._shape = (*size, 3)
        self._encoded = encoded
        self._seconds = seconds
        rng = np.random.default_rng(seed)
        self._labels = rng.integers(0, CLASSES, 2 * batch_size)
        self._records: Any = _files(seed) if encoded else _noise(rng, (2 * batch_size, *self._shape))

    def __len__(self) -> int:
        """Number of batches of an iteration."""
        return self._batches

    def __iter__(self) -> Iterator[tuple[Any, Labels]]:
        return map(self.batch, range(self._batches))

    def batch(self, number: int) -> tuple[Any, Labels]:
        """Return the batch of this number, after the same delay."""
        time.sleep(self._seconds * self._rows)
        return self._images(number), self._labels_of(number)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (self._batches, self._options)

    def _images(self, number: int) -> Any:
        if self._encoded:
            first = number * self._rows
            return [self._records[row % len(self._records)] for row in range(first, first + self._rows)]
        start = self._start(number)
        return self._records[start : start + self._rows]

    def _labels_of(self, number: int) -> Labels:
        labels = aligned(8 * self._rows).view(np.int64)
        start = number % (self._rows + 1)
        labels[:] = self._labels[start : start + self._rows]
        labels.flags.writeable = False
        return labels

    def _start(self, number: int) -> int:
        """A batch's first record, different for successive batches; its pixels are aligned."""
        step = ALIGNMENT // math.gcd(ALIGNMENT, math.prod(self._shape))
        return number % (self._rows // step + 1) * step

    @property
    def batch_specs(self) -> tuple[BatchSpec, ...]:
        """The parts of a batch."""
        rows = self._rows
        image = (
            BatchSpec("image", (rows,), None)
            if self._encoded
            else BatchSpec("image", (rows, *self._shape), np.dtype(np.uint8))
        )
        return image, BatchSpec("label", (rows,), np.dtype(np.int64))

    @property
    def batch_bytes(self) -> int:
        """Bytes of the arrays of a batch. Raises UsageError for encoded images."""
        return full_batch_bytes(self.batch_specs, self._rows)


def _noise(rng: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    memory = aligned(math.prod(shape))
    memory[:] = np.frombuffer(rng.bytes(memory.size), np.uint8)
    memory.flags.writeable = False
    return memory.reshape(shape)


def _rebuilt(batches: int, options: dict[str, Any]) -> FakeData:
    return FakeData(batches, **options)


def _files(seed: int) -> list[memoryview]:
    return [memoryview(file) for file in fake_files(seed)]


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
    folder = resources.files("shardprep.formats.sample.photographs")
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
