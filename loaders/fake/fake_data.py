"""Batches without a dataset, in a loader's place, to measure the steps after it."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import UsageError
from shardprep.loaders.batching.spec import BatchSpec
from shardprep.loaders.buffers.memory import ALIGNMENT, aligned
from shardprep.loaders.loader.epoch_loader import EpochLoader
from shardprep.loaders.loader.replaying.identity import digest_of
from shardprep.loaders.order.displaced_order import Records
from shardprep.loaders.order.epoch import Epoch, EpochPlan, LoadedStep
from shardprep.loaders.order.shuffle_quality import ShuffleQuality, shuffle_quality

from .fake_dataset import FakeDataset
from .fake_files import fake_files
from .fake_stats import FakeMeter, FakeStats

Labels = npt.NDArray[np.int64]

NONE_LEFT: Records = np.empty(0, np.int64)


class FakeData(EpochLoader):
    """Iterable of ``batches`` tuples of images and labels, which takes a :class:`Loader`'s place.

    Images are uint8 [B, H, W, 3] of noise, at a multiple of 64 bytes, where B is ``batch_size`` and ``size``
    is (H, W). With ``encoded`` they are a list of B memoryviews of JPEG files: crops of photographs, 110 KB
    on average, of 45 KB to 205 KB (5 to 95 %), about 480x400, regardless of ``size``. Labels are int64 [B], 0
    to ``classes`` - 1. All are read-only. Each batch is delayed by ``seconds`` per record, in a sleep, which
    uses no CPU and takes as long on a busy machine.

    The batches are views of few records that are made beforehand from ``seed``, two batches of pixels or 50
    files, which repeat. Equal arguments make equal batches in every epoch. An epoch has B * ``batches``
    records, which :meth:`receipt` counts and :attr:`dataset` has by number. Each process has all of them:
    there are no ranks. Several iterators may run at once, in any threads; state and receipt are of the one
    that was begun last. Picklable, in few bytes, without the state. Raises UsageError for arguments out of
    range.
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
        classes: int = 1000,
    ) -> None:
        least_ones = min(batch_size, classes, *size)
        if batches < 0 or least_ones < 1 or not 0 <= seconds < math.inf or not 0 <= seed < 1 << 64:
            raise UsageError(
                f"batches={batches}, batch_size={batch_size}, size={size}, seconds={seconds}, seed={seed}, "
                f"classes={classes}: there must be at least 0 batches, 1 record in each, 1 pixel on each side, "
                "0 seconds, a seed of 0 (and below 2**64) and 1 class"
            )
        self._options = {
            "batch_size": batch_size,
            "size": tuple(size),
            "encoded": encoded,
            "seconds": seconds,
            "seed": seed,
            "classes": classes,
        }
        self._batches = batches
        self._rows = batch_size
        self._shape = (*size, 3)
        self._encoded = encoded
        self._seconds = seconds
        self._classes = classes
        self._closed = False
        super().__init__(self._plan_of(batches, batch_size, seed))
        rng = np.random.default_rng(seed)
        self._labels = rng.integers(0, classes, 2 * batch_size)
        self._pool: Any = _files(seed) if encoded else _noise(rng, (2 * batch_size, *self._shape))
        self._meter = FakeMeter()

    def _plan_of(self, batches: int, batch_size: int, seed: int) -> EpochPlan:
        made_of = {**self._options, "seconds": 0, "batches": batches}
        return EpochPlan(
            dataset=f"fake:{digest_of(made_of)}",
            shard_counts=(batches * batch_size,),
            shuffle=None,
            seed=seed,
            batch_size=batch_size,
            rank=0,
            world_size=1,
            drop_last=True,
        )

    def __iter__(self) -> Iterator[tuple[Any, Labels]]:
        """Begin the next epoch; one that was left early is not continued. Raises UsageError once closed."""
        self._check_open()
        return self._run(self._begin())

    def _run(self, epoch: Epoch) -> Iterator[tuple[Any, Labels]]:
        run = self._meter.run()
        for number in range(epoch.place // self._rows, self._batches):
            self._check_open()
            began = perf_counter()
            batch = self.batch(number)
            ready = perf_counter()
            epoch.delivered(self._numbers(number), [])
            run.delivered(self._rows, began=began, ready=ready, handed=perf_counter())
            yield batch
        epoch.end()

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this FakeData is closed; make a new one")

    def steps(self, epoch: int, steps: Iterable[int]) -> Iterator[LoadedStep]:
        """Yield the batches of these steps, in the order given; every epoch has the same.

        Place and receipt do not change. Raises IndexError for a step that the epoch does not have.
        """
        for step in steps:
            self._plan.split(0).places(step)  # checks the step
            yield LoadedStep(step, self.batch(step), self._numbers(step), NONE_LEFT, NONE_LEFT)

    def batch(self, number: int) -> tuple[Any, Labels]:
        """Return the batch of this number, after the same delay."""
        if self._seconds:  # a sleep of 0 would still hand the CPU to other processes
            time.sleep(self._seconds * self._rows)
        return self._images(number), self._labels_of(number)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (self._batches, self._options)

    def _numbers(self, number: int) -> Records:
        return np.arange(number * self._rows, (number + 1) * self._rows)

    def _record(self, number: int) -> tuple[Any, int]:
        """The image and label of a record, without the delay."""
        batch, row = divmod(number, self._rows)
        return self._images(batch)[row], int(self._labels_of(batch)[row])

    def _images(self, number: int) -> Any:
        if self._encoded:
            first = number * self._rows
            return [self._pool[row % len(self._pool)] for row in range(first, first + self._rows)]
        start = self._start(number)
        return self._pool[start : start + self._rows]

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
    def dataset(self) -> FakeDataset:
        """The records of an epoch by number, without a delay, and the names of the classes."""
        records = self._batches * self._rows
        return FakeDataset(self._record, records=records, classes=self._classes)

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
    def most_held(self) -> int:
        """Number of batches that may be held at a time: any, since none is copied."""
        return sys.maxsize

    @property
    def identity(self) -> dict[str, str]:
        """The values that determine the batches, by name; ``seconds`` does not."""
        names = ("batch_size", "size", "encoded", "seed", "classes")
        return {
            "dataset": self._plan.dataset,
            "NumPy": np.__version__,
            **{name.replace("_", " "): str(self._options[name]) for name in names},
        }

    def key(self, number: int) -> str:
        """Return the key of the record with this number."""
        return self.dataset.key(number)

    @property
    def skipped(self) -> dict[str, str]:
        """The bad records that were skipped so far: always none."""
        return {}

    def stats(self) -> FakeStats:
        """Return the counts and times since this was made, to be printed. Thread-safe."""
        size = np.mean([len(file) for file in self._pool]) if self._encoded else math.prod(self._shape)
        return self._meter.read(image_bytes=float(size))

    def shuffle_quality(self, epoch: int = 0) -> ShuffleQuality:
        """Return how well the batches of an epoch are mixed: every epoch has the same."""
        labels = [self._labels_of(number) for number in range(self._batches)]
        return shuffle_quality(self._plan, np.concatenate([NONE_LEFT, *labels]), epoch)

    def __repr__(self) -> str:
        return f"<FakeData: {self._batches:,} batches of {self._rows:,} records, epoch {self.epoch} next>"

    def close(self) -> None:
        """End the iterations; delivered batches stay valid. Idempotent."""
        self._closed = True


def _noise(rng: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    memory = aligned(math.prod(shape))
    memory[:] = np.frombuffer(rng.bytes(memory.size), np.uint8)
    memory.flags.writeable = False
    return memory.reshape(shape)


def _rebuilt(batches: int, options: dict[str, Any]) -> FakeData:
    return FakeData(batches, **options)


def _files(seed: int) -> list[memoryview]:
    return [memoryview(file) for file in fake_files(seed)]
