"""What a sample holds: its classes, images and oddities, known before a pixel is drawn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import cached_property

import numpy as np
import numpy.typing as npt

from .errors import UsageError
from .labels import official_words

PHOTOGRAPHS = 25
MAX_NUMBER_GAP = 400  # the real set numbers train images with gaps and with up to 5 digits

Seed = tuple[int, ...]


class Oddity(StrEnum):
    """A peculiarity of the real set. The n-th is made of photograph n: cmyk.jpg shows photograph 1."""

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


class Stream(IntEnum):
    """What random numbers are for; each use draws from a stream of its own."""

    TRAIN = 1
    VAL = 2
    TEST = 3
    CLASSES = 4
    NUMBERS = 5
    TAR_ORDER = 6
    BOXES = 7


@dataclass(frozen=True, slots=True)
class SampleImage:
    """One image to draw. ``label`` counts from 0 in devkit order; ``seed`` decides crop and light."""

    key: str
    label: int
    photograph: int
    seed: Seed
    oddity: Oddity | None = None

    @property
    def file_name(self) -> str:
        """The name in its tar: the key's last part and ``.JPEG``, whatever the format really is."""
        return self.key.rpartition("/")[2] + ".JPEG"


@dataclass(frozen=True)
class SamplePlan:
    """How much of everything; equal plans give equal samples. Raises UsageError for impossible ones.

    Images of a split are counted across the classes: number ``n`` belongs to class ``n % classes``
    and shows that class's photograph ``n // classes``, so that for ``n`` < 25 it is photograph ``n``.
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
        """The classes in devkit order: ``wnids[i]`` has ILSVRC2012_ID *i* + 1. Not sorted, as there."""
        official = tuple(official_words())
        order = unsorted_permutation(np.random.default_rng((self.seed, Stream.CLASSES)), len(official))
        return tuple(official[i] for i in order[: self.classes])

    def photographs(self, label: int) -> range:
        """The photographs that a class shows; from 26 classes on they are shared."""
        return range(label % PHOTOGRAPHS, PHOTOGRAPHS, self.classes)

    def train_images(self, label: int) -> Iterator[SampleImage]:
        """The images of one class, by ascending number; numbers have gaps and no fixed width."""
        wnid = self.wnids[label]
        rng = np.random.default_rng((self.seed, Stream.NUMBERS, label))
        gaps = rng.integers(2, MAX_NUMBER_GAP, self.train_per_class)
        for rank, number in enumerate(gaps.cumsum()):
            n = rank * self.classes + label
            yield self._image(f"{wnid}/{wnid}_{number}", n, Stream.TRAIN, TRAIN_ODDITIES)

    def val_images(self) -> Iterator[SampleImage]:
        """By ascending name, the order of the ground truth; classes are mixed and even."""
        return self._flat_images("val", self.val, Stream.VAL, VAL_ODDITIES)

    def test_images(self) -> Iterator[SampleImage]:
        """By ascending name; their labels are told nowhere in the archives."""
        return self._flat_images("test", self.test, Stream.TEST, {})

    def _flat_images(
        self, split: str, count: int, stream: Stream, oddities: Mapping[int, Oddity]
    ) -> Iterator[SampleImage]:
        mixed = np.random.default_rng((self.seed, stream)).permutation(count)
        for number, n in enumerate(mixed.tolist(), start=1):
            yield self._image(f"ILSVRC2012_{split}_{number:08d}", n, stream, oddities)

    def _image(self, key: str, n: int, stream: Stream, oddities: Mapping[int, Oddity]) -> SampleImage:
        rank, label = divmod(n, self.classes)
        choice = self.photographs(label)
        seed = (self.seed, stream, label, rank)
        return SampleImage(key, label, choice[rank % len(choice)], seed, oddities.get(n))


def unsorted_permutation(rng: np.random.Generator, count: int) -> npt.NDArray[np.int64]:
    """A permutation of ``range(count)`` that starts with a descent: with two or more, never sorted."""
    order = rng.permutation(count)
    order[:2] = np.sort(order[:2])[::-1]
    return order
