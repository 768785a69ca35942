"""The plan of a sample: its classes, images and oddities, before any image is made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import cached_property

import numpy as np
import numpy.typing as npt

from shardprep.formats.errors import UsageError
from shardprep.formats.records.labels import official_words

PHOTOGRAPHS = 25
MAX_NUMBER_GAP = 400  # the real set numbers train images with gaps and with up to 5 digits

Seed = tuple[int, ...]


class Oddity(StrEnum):
    """An oddity of the real set. The n-th is made of photograph n: cmyk.jpg is photograph 1."""

    PNG = "RGBA PNG"
    CMYK = "CMYK"
    GRAYSCALE = "grayscale"
    PROGRESSIVE = "progressive"
    EXIF_6 = "EXIF orientation 6"
    EXIF_3 = "EXIF orientation 3"
    EXIF_8 = "EXIF orientation 8"
    CORRUPT_EXIF = "corrupt EXIF"
    TINY_20X17 = "20x17 pixels"
    TINY_8X8 = "8x8 pixels"


TRAIN_ODDITIES = dict(enumerate(Oddity))
VAL_ODDITIES = {
    number: oddity
    for number, oddity in TRAIN_ODDITIES.items()
    if oddity in (Oddity.CMYK, Oddity.GRAYSCALE, Oddity.EXIF_6)
}


class RandomUse(IntEnum):
    """The uses of random numbers; each use has a separate stream."""

    TRAIN = 1
    VAL = 2
    TEST = 3
    CLASSES = 4
    NUMBERS = 5
    TAR_ORDER = 6
    BOXES = 7


@dataclass(frozen=True, slots=True)
class SampleImage:
    """One image to make. ``label`` counts from 0 in devkit order; ``seed`` decides crop and brightness."""

    key: str
    label: int
    photograph: int
    seed: Seed
    oddity: Oddity | None = None

    @property
    def file_name(self) -> str:
        """The name in its tar: the key's last part and ``.JPEG``, for any format."""
        return self.key.rpartition("/")[2] + ".JPEG"


@dataclass(frozen=True)
class SamplePlan:
    """The numbers of a sample; equal plans give equal samples. Raises UsageError for impossible numbers.

    Images of a split are counted across the classes: number ``n`` belongs to class ``n % classes``
    and shows that class's photograph ``n // classes``, so for ``n`` < 25 it is photograph ``n``.
    """

    classes: int
    train_per_class: int
    val: int
    test: int
    seed: int

    def __post_init__(self) -> None:
        counts = {
            "classes": self.classes,
            "train-per-class": self.train_per_class,
            "val": self.val,
            "test": self.test,
        }
        for name, count in counts.items():
            if count < 1:
                raise UsageError(f"{name} is {count}; a sample needs 1 or more")
        most = len(official_words())
        if self.classes > most:
            raise UsageError(f"classes is {self.classes}; ILSVRC12 has {most} to choose from")
        if self.seed < 0:
            raise UsageError(f"seed is {self.seed}; give 0 or more")

    @cached_property
    def wnids(self) -> tuple[str, ...]:
        """The classes in devkit order, not sorted, as there: ``wnids[i]`` has ILSVRC2012_ID *i* + 1."""
        official = tuple(official_words())
        order = unsorted_permutation(np.random.default_rng((self.seed, RandomUse.CLASSES)), len(official))
        return tuple(official[i] for i in order[: self.classes])

    def photographs(self, label: int) -> range:
        """Return the photographs of a class; from 26 classes on, classes share them."""
        return range(label % PHOTOGRAPHS, PHOTOGRAPHS, self.classes)

    def train_images(self, label: int) -> Iterator[SampleImage]:
        """Yield the images of one class by ascending number; numbers have gaps and no fixed width."""
        wnid = self.wnids[label]
        rng = np.random.default_rng((self.seed, RandomUse.NUMBERS, label))
        gaps = rng.integers(2, MAX_NUMBER_GAP, self.train_per_class)
        for rank, number in enumerate(gaps.cumsum()):
            n = rank * self.classes + label
            yield self._image(f"{wnid}/{wnid}_{number}", n, RandomUse.TRAIN, TRAIN_ODDITIES)

    def val_images(self) -> Iterator[SampleImage]:
        """Return the images by ascending name, the order of the ground truth; classes are mixed and even."""
        return self._flat_images("val", self.val, RandomUse.VAL, VAL_ODDITIES)

    def test_images(self) -> Iterator[SampleImage]:
        """Return the images by ascending name; no archive has their labels."""
        return self._flat_images("test", self.test, RandomUse.TEST, {})

    def _flat_images(
        self, split: str, count: int, stream: RandomUse, oddities: Mapping[int, Oddity]
    ) -> Iterator[SampleImage]:
        mixed = np.random.default_rng((self.seed, stream)).permutation(count)
        for number, n in enumerate(mixed.tolist(), start=1):
            yield self._image(f"ILSVRC2012_{split}_{number:08d}", n, stream, oddities)

    def _image(self, key: str, n: int, stream: RandomUse, oddities: Mapping[int, Oddity]) -> SampleImage:
        rank, label = divmod(n, self.classes)
        choice = self.photographs(label)
        seed = (self.seed, stream, label, rank)
        return SampleImage(key, label, choice[rank % len(choice)], seed, oddities.get(n))


def unsorted_permutation(rng: np.random.Generator, count: int) -> npt.NDArray[np.int64]:
    """Return a permutation of ``range(count)`` that begins with a descent, so that it is never sorted."""
    order = rng.permutation(count)
    order[:2] = np.sort(order[:2])[::-1]
    return order
