"""Batches from nowhere: to measure what comes after a loader without one."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ..formats.errors import UsageError
from .batch_spec import BatchSpec, full_batch_bytes
from .memory import ALIGNMENT, aligned

CLASSES = 1000

Labels = npt.NDArray[np.int64]


class FakeData:
    """Iterating it yields ``batches`` tuples of images and labels, such as a :class:`Loader` does.

    Images are uint8 [B, H, W, 3] of noise, ``size`` being (H, W), on 64 bytes; with ``encoded`` a list of B
    memoryviews instead, of JPEG files that decode: crops of photographs, 110 KB on average, of 45 KB to
    205 KB (5 to 95 %), about 480x400, whatever ``size`` says. Labels are int64 [B], 0 to 999. All are
    read-only. Each record costs ``seconds``, slept before its batch comes: to sleep takes no CPU from what
    is measured, and takes as long on a busy machine.

    The batches are views of few records that are made beforehand, two batches of pixels or 50 files, which
    repeat. Equal arguments make equal batches, in every iteration. Several iterators may run at once, in any
    threads. Picklable, in few bytes. Raises UsageError.
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
                "must be at least 0 batches, 1 record in each, 1 pixel on each side, 0 seconds and 0 as a seed"
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
        """How many batches an iteration yields."""
        return self._batches

    def __iter__(self) -> Iterator[tuple[Any, Labels]]:
        return map(self.batch, range(self._batches))

    def batch(self, number: int) -> tuple[Any, Labels]:
        """One of the batches, at the same cost."""
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
        """Another one for each batch, as far as there are; on 64 bytes."""
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
    from .fake_files import fake_files  # takes a second, and OpenCV

    return [memoryview(file) for file in fake_files(seed)]
