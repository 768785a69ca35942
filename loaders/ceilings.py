"""What a loader cannot exceed: one core that transforms, and batches in which nothing is done."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..formats.dataset import Dataset
from ..formats.opencv import cv2
from ..formats.record import Record
from ..formats.shard import Room
from .engine import Engine
from .rng import RecordRandom
from .shard_work import ITEM
from .slots import Arrays, SlotLayout
from .transforms import Transform, fill_rows, outputs_of
from .work import Clock, Fill, Items

HELD = 64 << 20  # bytes of records, read before they are transformed


def one_core_rate(dataset: Dataset, transform: Transform, *, seconds: float) -> float:
    """Images per second that this thread makes of records, spread over the dataset, that lie in memory.

    OpenCV is kept to this thread meanwhile. What the transform raises, this raises.
    """
    with _one_thread():
        records, random = _some(dataset), RecordRandom(0)
        rows = tuple(np.empty(spec.shape, spec.dtype) for spec in outputs_of(transform) or ())
        began, passed, done = time.perf_counter(), 0.0, 0
        while not done or passed < seconds:
            epoch, place = divmod(done, len(records))
            if rows:
                fill_rows(transform, records[place], random(epoch, place), rows)
            else:
                transform(records[place], random(epoch, place))
            done += 1
            passed = time.perf_counter() - began
        return done / passed


def _some(dataset: Dataset) -> Sequence[Record]:
    mean = dataset.manifest.image_bytes / len(dataset)
    count = max(1, min(len(dataset), int(HELD / max(1.0, mean))))
    return [dataset[place * len(dataset) // count] for place in range(count)]


@contextmanager
def _one_thread() -> Iterator[None]:
    before = cv2.getNumThreads()
    cv2.setNumThreads(0)
    try:
        yield
    finally:
        cv2.setNumThreads(before)


@dataclass(frozen=True)
class NullWork:
    """Leaves every row as it is."""

    item_dtype: np.dtype[Any] = ITEM
    stages: tuple[str, ...] = ()

    @contextmanager
    def open(self, clock: Clock) -> Iterator[Fill]:
        yield _leave


def _leave(items: Items, arrays: Arrays, room: Room) -> Iterable[None]:
    return itertools.repeat(None, len(items))


def hand_over_rate(layout: SlotLayout, *, workers: int, slots: int, seconds: float) -> float:
    """Images per second of full batches of such a form that are passed on with nothing in them."""
    items = np.zeros(layout.rows, ITEM)
    with Engine(NullWork(), layout, workers=workers, slots=slots) as engine:
        batches = engine.run(itertools.repeat(items))
        with closing(batches):  # type: ignore[type-var]
            next(batches)
            began, passed, images = time.perf_counter(), 0.0, 0
            while not images or passed < seconds:
                images += len(next(batches).items)
                passed = time.perf_counter() - began
            return images / passed
