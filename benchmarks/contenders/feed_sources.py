"""The sources of batches for TensorFlow in the benchmarks: a ring of constants, and Loaders."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from contenders.own_contenders import Constant

from shardprep.loaders import Loader, TrainTransform
from shardprep.loaders.batches.pickling import allocate_aligned
from shardprep.loaders.loader.loader import DEFAULT_SLOTS

ROWS, SIZE = 256, 224
SHAPE = (ROWS, SIZE, SIZE, 3)

Batch = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]


@dataclass
class Ring:
    """As many constant batches as a Loader has slots, cyclically; an epoch has ``length`` of them.

    With ``interval`` it delivers one batch in so many seconds. Like workers, it makes up to ``ahead`` batches
    before they are requested; with 0 a batch is begun when it is requested.
    """

    batches_never_change: ClassVar[bool] = True

    length: int = 1000
    interval: float = 0.0
    ahead: int = DEFAULT_SLOTS
    slots: list[npt.NDArray[np.uint8]] = field(
        default_factory=lambda: [_slot() for _ in range(DEFAULT_SLOTS)]
    )

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Batch]:
        due = time.perf_counter()
        for number in range(self.length):
            if self.interval:
                due = max(due, time.perf_counter() - self.ahead * self.interval) + self.interval
                time.sleep(max(0.0, due - time.perf_counter()))
            yield self.slots[number % len(self.slots)].view(), np.zeros(ROWS, np.int64)


def _slot() -> npt.NDArray[np.uint8]:
    slot = allocate_aligned(int(np.prod(SHAPE))).reshape(SHAPE)
    slot[...] = 127
    return slot


def filling(shards: Path, *, workers: int) -> Loader:
    """A Loader that decodes nothing: its workers write a constant."""
    return _loader(shards, Constant(SIZE), workers)


def decoding(shards: Path, *, workers: int) -> Loader:
    """A Loader of train crops."""
    return _loader(shards, TrainTransform(SIZE), workers)


def _loader(shards: Path, transform: Any, workers: int) -> Loader:
    return Loader(shards, batch_size=ROWS, transform=transform, workers=workers, rank=0, world_size=1)


def endless(batches: Iterable[Batch]) -> Iterator[Batch]:
    """The batches of one epoch after the other."""
    while True:
        yield from batches
