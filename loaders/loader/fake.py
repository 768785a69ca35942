"""A stand-in for a loader that needs no dataset, to measure the steps after it."""

from __future__ import annotations

import math
import operator
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import resources
from time import perf_counter
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import UsageError
from shardprep.formats.images.decode import png_of
from shardprep.formats.images.opencv import cv2
from shardprep.formats.records.labels import SPACES
from shardprep.formats.records.record import Record
from shardprep.formats.runtime.owned import Closable
from shardprep.formats.runtime.workers import usable_cpus
from shardprep.loaders.batches.pickling import ALIGNMENT, aligned
from shardprep.loaders.batches.stack import BatchSpec
from shardprep.loaders.engine.engine import Meter
from shardprep.loaders.engine.trace import BatchWait
from shardprep.loaders.loader.epoch_loader import EpochLoader
from shardprep.loaders.loader.replay import Replayed, ReplayedRecord, RunOrder
from shardprep.loaders.loader.run_card import RunCard, digest_of
from shardprep.loaders.loader.stats import LoaderStats
from shardprep.loaders.order.epoch import Epoch, EpochPlan, LoadedStep
from shardprep.loaders.order.parts import Records
from shardprep.loaders.order.quality import ShuffleQuality, shuffle_quality


class FakeDataset(Closable):
    """The records of a FakeData, as a stand-in for a Dataset: by number, ``len``, iteration and ``classes``.

    ``made_by(number)`` returns a record's image and label. Pixels become PNG files, which decode to them.
    """

    def __init__(self, made_by: Callable[[int], tuple[Any, int]], *, records: int, classes: int) -> None:
        self._made_by = made_by
        self._records = records
        self._classes = classes

    def __len__(self) -> int:
        return self._records

    def __getitem__(self, number: int) -> Record:
        number = operator.index(number)
        if not -len(self) <= number < len(self):
            raise IndexError(f"record {number} of {len(self)}")
        number %= len(self)
        image, label = self._made_by(number)
        encoded = bytes(image) if isinstance(image, memoryview) else png_of(image)
        return Record(self.key(number), label, encoded)

    def __iter__(self) -> Iterator[Record]:
        return map(self.__getitem__, range(len(self)))

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes; label *i* stands for ``classes[i]``."""
        digits = len(str(self._classes - 1))
        return tuple(f"class{number:0{digits}}" for number in range(self._classes))

    def key(self, number: int) -> str:
        """Return the key of the record with this number."""
        return f"fake/{number}"

    def __repr__(self) -> str:
        return f"<FakeDataset: {len(self):,} records of {self._classes:,} classes>"

    def close(self) -> None:
        """Do nothing: no file is open."""


PER_PHOTOGRAPH = 2
MEAN_BYTES = 110_000
SPREAD = 0.55  # standard deviation of the logarithm of a file's size
BYTES_PER_PIXEL = 0.57  # measured with this grain and quality
GRAIN, QUALITY = 7, 96
ASPECTS = (4 / 3, 4 / 3, 3 / 4, 1.0)

Pixels = npt.NDArray[np.uint8]


def fake_files(seed: int) -> list[memoryview]:
    """Make fifty JPEG files, 110 KB on average. Deterministic for equal releases of OpenCV and NumPy."""
    rng = np.random.default_rng(seed)
    folder = resources.files("shardprep.formats.data.photographs")
    names = sorted(path.name for path in folder.iterdir() if path.name.endswith(".jpg"))
    files = [(folder / name).read_bytes() for name in names if name != "cmyk.jpg"]
    photographs = [cv2.imdecode(np.frombuffer(file, np.uint8), cv2.IMREAD_COLOR) for file in files]
    count = PER_PHOTOGRAPH * len(photographs)
    sizes = np.exp(SPREAD * rng.standard_normal(count))
    pixels = sizes / sizes.mean() * MEAN_BYTES / BYTES_PER_PIXEL
    return [
        memoryview(_file(photographs[n % len(photographs)], area, rng))  # type: ignore[arg-type]
        for n, area in enumerate(pixels.tolist())
    ]


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


@dataclass(frozen=True, repr=False)
class FakeStats(LoaderStats):
    """Stats of a FakeData in the form of a Loader's, without workers; the only stage is the ``delay``."""

    alone: ClassVar[str] = "FakeData itself takes this time, with seconds= for each record"


Labels = npt.NDArray[np.int64]

NONE_LEFT: Records = np.empty(0, np.int64)


class FakeData(EpochLoader):
    """Iterable over made-up batches of images and labels, as a stand-in for a :class:`Loader`.

    Images are uint8 [B, H, W, 3] of noise, aligned to 64 bytes, and labels int64 [B], 0 to ``classes`` - 1.
    All are read-only. The batches are views of a few records made in advance from ``seed``, two batches of
    pixels or 50 files, which repeat. Equal arguments make equal batches in every epoch. An epoch has
    B * ``batches`` records, which :meth:`receipt` counts and :attr:`dataset` has by number.

    There are no ranks: each process gets all batches. Several iterators may run at once, in any threads;
    state and receipt belong to the latest one. A pickle is small and does not include the state.

    Args:
        batches: Number of batches per epoch.
        batch_size: Records per batch, B.
        size: (H, W) of the images.
        encoded: Whether images are instead a list of B memoryviews of JPEG files: crops of photographs, 110
            KB on average, 45 KB to 205 KB (5th to 95th percentile), about 480x400, regardless of ``size``.
        seconds: Delay of each batch per record, as a sleep, which uses no CPU and takes as long on a busy
            machine.
        seed: Seed of the records, 0 to 2**64 - 1.
        classes: Number of classes.

    Raises:
        UsageError: An argument is out of range.
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
        self._options: dict[str, Any] = {
            "batch_size": batch_size,
            "size": tuple(size),
            "encoded": encoded,
            "seconds": seconds,
            "seed": seed,
            "classes": classes,
        }
        self._batches, self._rows, self._shape = batches, batch_size, (*size, 3)
        self._encoded, self._seconds, self._classes = encoded, seconds, classes
        self._closed = False
        made_of = {**self._options, "seconds": 0, "batches": batches}
        super().__init__(
            EpochPlan(
                dataset=f"fake:{digest_of(made_of)}",
                shard_counts=(batches * batch_size,),
                shuffle=None,
                seed=seed,
                batch_size=batch_size,
                rank=0,
                world_size=1,
                drop_last=True,
            )
        )
        rng = np.random.default_rng(seed)
        self._labels = rng.integers(0, classes, 2 * batch_size)
        self._pool: Any = fake_files(seed) if encoded else None
        if not encoded:
            noise = aligned(2 * batch_size * math.prod(self._shape))
            noise[:] = np.frombuffer(rng.bytes(noise.size), np.uint8)
            noise.flags.writeable = False
            self._pool = noise.reshape(-1, *self._shape)
        self._meter = Meter()
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[tuple[Any, Labels]]:
        """Iterate the next epoch, as a Loader does. Raises UsageError once closed."""
        self._check_open()
        self._waiting = self._next
        return self._run()

    def _run(self) -> Iterator[tuple[Any, Labels]]:
        epoch = self._begin()
        with self._meter.run():
            for numbers in epoch.batches():
                self._check_open()
                began = perf_counter()
                batch = self.batch(int(numbers[0]) // self._rows)
                ready = perf_counter()
                epoch.delivered(numbers, [])
                with self._lock:
                    self._meter.count(BatchWait(0, 0, self._rows, began, ready, perf_counter()))
                yield batch
        epoch.end()

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this FakeData is closed; make a new one")

    def steps(self, epoch: int, steps: Iterable[int]) -> Iterator[LoadedStep]:
        """Yield the batches of these steps, in the order given, the same in every epoch.

        Place and receipt do not change. Raises IndexError for a step that does not exist.
        """
        whole = Epoch(self._plan, epoch)
        for step in steps:
            numbers = whole.batch(step)  # checks the step
            yield LoadedStep(step, self.batch(step), numbers)

    def batch(self, number: int) -> tuple[Any, Labels]:
        """Return the batch with this number, after the delay."""
        if self._seconds:  # a sleep of 0 would still hand the CPU to other processes
            time.sleep(self._seconds * self._rows)
        return self._images(number), self._labels_of(number)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(FakeData, self._batches, **self._options), ()

    def _record(self, number: int) -> tuple[Any, int]:
        """Return the image and label of a record, without the delay."""
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
        """Return a batch's first record, different for successive batches, with aligned pixels."""
        step = ALIGNMENT // math.gcd(ALIGNMENT, math.prod(self._shape))
        return number % (self._rows // step + 1) * step

    @property
    def dataset(self) -> FakeDataset:
        """The records of an epoch by number, without the delay, and the names of the classes."""
        records = self._batches * self._rows
        return FakeDataset(self._record, records=records, classes=self._classes)

    @property
    def batch_specs(self) -> tuple[BatchSpec, ...]:
        rows = (self._rows,)
        shape, dtype = (rows, None) if self._encoded else ((*rows, *self._shape), np.dtype(np.uint8))
        return BatchSpec("image", shape, dtype), BatchSpec("label", rows, np.dtype(np.int64))

    @property
    def identity(self) -> dict[str, str]:
        """The values that determine the batches, by name, without ``seconds``."""
        names = ("batch_size", "size", "encoded", "seed", "classes")
        return {
            "dataset": self._plan.dataset,
            "NumPy": np.__version__,
            **{name.replace("_", " "): str(self._options[name]) for name in names},
        }

    def replay(self, epoch: int, step: int, *, start: int = 0) -> Replayed:
        """Reproduce the batch of a step of an epoch, without the delay."""
        numbers = Epoch(self._plan, epoch, start=start).batch(step)
        number = int(numbers[0]) // self._rows
        batch = self._images(number), self._labels_of(number)
        rows = zip(numbers.tolist(), batch[1].tolist(), strict=True)
        records = (ReplayedRecord(record, self.key(record), label) for record, label in rows)
        return Replayed(epoch, step, batch, tuple(records))

    def _class_of(self, number: int) -> str:
        dataset = self.dataset
        return dataset.classes[dataset[number].label]

    def card(self) -> RunCard:
        """Return all that determines the batches; it cannot make a Loader."""
        return RunCard.of(
            self._plan,
            dataset=self._plan.dataset,
            split="",
            labels=SPACES[0],
            on_bad_record="raise",
            with_numbers=False,
            **dict.fromkeys(("records", "columns", "weights", "transform")),
        )

    def order_of(self, card: RunCard | None = None) -> RunOrder:
        return RunOrder(card or self.card(), self._plan, lambda numbers, epoch: numbers, self._all_labels())

    def _all_labels(self) -> Labels:
        return np.concatenate([NONE_LEFT, *map(self._labels_of, range(self._batches))])

    def key(self, number: int) -> str:
        return self.dataset.key(number)

    def stats(self) -> FakeStats:
        size = np.mean([len(file) for file in self._pool]) if self._encoded else math.prod(self._shape)
        with self._lock:
            counts, making = self._meter.counts, self._meter.waiting
        return FakeStats(
            **counts,
            blocked=0.0,
            filling=(making,),
            waiting=(0.0,),
            cpu=(0.0,),
            queued=(0.0,),
            stages={"delay": making},
            copied=0,
            restarts=0,
            workers=0,
            cpus=usable_cpus(),
            image_bytes=float(size),
            crop_ready=0.0,
        )

    def shuffle_quality(self, epoch: int = 0) -> ShuffleQuality:
        """Measure how well the batches of an epoch are mixed; every epoch has the same."""
        return shuffle_quality(self._plan, self._all_labels(), epoch)

    def __repr__(self) -> str:
        return f"<FakeData: {self._batches:,} batches of {self._rows:,} records, epoch {self.epoch} next>"

    def close(self) -> None:
        """Stop all iterations; delivered batches stay valid. Idempotent."""
        self._closed = True
