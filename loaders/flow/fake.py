"""Made-up batches and items, to measure the steps after them without a dataset."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.formats.images.opencv import cv2
from shardprep.formats.runtime.lazy import cached_property
from shardprep.formats.runtime.sizes import checked_int, seed_of
from shardprep.loaders.batches.pickling import ALIGNMENT, aligned
from shardprep.loaders.flow.node import Fetch, Fetched, Length, checked_seconds, exact, fetch_by, within
from shardprep.loaders.flow.passes import PassContext

PER_PHOTOGRAPH = 2
MEAN_BYTES = 110_000
SPREAD = 0.55  # standard deviation of the logarithm of a file's size
BYTES_PER_PIXEL = 0.57  # measured with this grain and quality
GRAIN, QUALITY = 7, 96
ASPECTS = (4 / 3, 4 / 3, 3 / 4, 1.0)


def fake_files(seed: int) -> list[memoryview]:
    """Make fifty JPEG files, 110 KB on average. Deterministic for equal releases of OpenCV and NumPy."""
    rng = np.random.default_rng(seed)
    folder = resources.files("shardprep.formats.data.photographs")
    names = sorted(path.name for path in folder.iterdir() if path.name.endswith(".jpg"))
    files = [(folder / name).read_bytes() for name in names if name != "cmyk.jpg"]
    photographs: list[Any] = [cv2.imdecode(np.frombuffer(file, np.uint8), cv2.IMREAD_COLOR) for file in files]
    count = PER_PHOTOGRAPH * len(photographs)
    sizes = np.exp(SPREAD * rng.standard_normal(count))
    pixels = sizes / sizes.mean() * MEAN_BYTES / BYTES_PER_PIXEL
    made = []
    for n, area in enumerate(pixels.tolist()):
        aspect, photograph = ASPECTS[rng.integers(len(ASPECTS))], photographs[n % len(photographs)]
        target = round((area * aspect) ** 0.5), round((area / aspect) ** 0.5)
        height, width = (round(side * rng.uniform(0.6, 1.0)) for side in photograph.shape[:2])
        y, x = (int(rng.integers(side + 1)) for side in np.subtract(photograph.shape[:2], (height, width)))
        image = cv2.resize(photograph[y : y + height, x : x + width], target, interpolation=cv2.INTER_CUBIC)
        grain = GRAIN * rng.standard_normal(image.shape, np.float32)
        noisy = np.clip(image + grain, 0, 255).astype(np.uint8)
        file = cv2.imencode(".jpg", noisy, [cv2.IMWRITE_JPEG_QUALITY, QUALITY])[1].tobytes()
        made.append(memoryview(file))
    return made


@dataclass(frozen=True)
class MadeUp:
    """Batches of noise images, or of encoded files, and labels: views of a few records made once.

    The options are those of :class:`.FakeData`. Picklable to a few bytes. Raises UsageError for an option
    that is out of range.
    """

    batch_size: int
    size: tuple[int, int]
    encoded: bool
    seconds: float
    seed: int
    classes: int = 1000

    def __post_init__(self) -> None:
        sides = [("each side of size", side) for side in self.size]
        for name, value in [("batch_size", self.batch_size), ("classes", self.classes), *sides]:
            checked_int(value, name, least=1)
        checked_seconds(self.seconds, "the time per record")
        seed_of(self.seed)
        self._records  # noqa: B018 - in advance, so that the first batch takes no longer than others

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), astuple(self)

    @cached_property
    def _records(self) -> tuple[npt.NDArray[np.int64], Any]:
        """The labels and images of two batches, or of all files."""
        rng = np.random.default_rng(self.seed)
        labels = rng.integers(0, self.classes, 2 * self.batch_size)
        if self.encoded:
            return labels, fake_files(self.seed)
        noise = aligned(2 * self.batch_size * math.prod(self._shape))
        noise[:] = np.frombuffer(rng.bytes(noise.size), np.uint8)
        noise.flags.writeable = False
        return labels, noise.reshape(-1, *self._shape)

    @property
    def _shape(self) -> tuple[int, int, int]:
        return (*self.size, 3)

    def batch(self, number: int) -> tuple[Any, npt.NDArray[np.int64]]:
        """Return the images and labels of the batch with this number, after the delay."""
        if self.seconds:  # a sleep of 0 would still hand the CPU to other processes
            time.sleep(self.seconds * self.batch_size)
        known, images = self._records
        labels = aligned(8 * self.batch_size).view(np.int64)
        start = number % (self.batch_size + 1)
        labels[:] = known[start : start + self.batch_size]
        labels.flags.writeable = False
        first = number * self.batch_size
        if self.encoded:
            return [images[row % len(images)] for row in range(first, first + self.batch_size)], labels
        step = ALIGNMENT // math.gcd(ALIGNMENT, math.prod(self._shape))  # so that pixels are aligned
        start = number % (self.batch_size // step + 1) * step
        return images[start : start + self.batch_size], labels

    def item(self, number: int) -> tuple[Any, int]:
        """Return the image and label of a batch of one record."""
        (image,), labels = self.batch(number)
        return image.obj if isinstance(image, memoryview) else image, labels.item()


@dataclass(frozen=True)
class FromFakeData(Fetched):
    """``count`` made-up items. See :meth:`.Flow.fake`."""

    data: MadeUp
    count: int

    title = "fake"
    facts = "{0.length}"

    @property
    def length(self) -> Length:
        return exact(self.count)

    @property
    def fetch(self) -> Fetch:
        return fetch_by(self.data.item)

    def keys(self, now: PassContext, numbers: Iterable[int] | None) -> Iterator[int]:
        return within(numbers, self.length)


@dataclass(frozen=True)
class FromFakeBatches(FromFakeData):
    """``count`` made-up batches. See :class:`.FakeData`."""

    facts = (
        "{0.length}, batch_size={0.data.batch_size}, size={0.data.size}, encoded={0.data.encoded}, "
        "seed={0.data.seed}, classes={0.data.classes}"
    )

    @property
    def fetch(self) -> Fetch:
        return fetch_by(self.data.batch)
