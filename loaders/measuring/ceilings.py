"""Upper limits of a loader's rate: one core that transforms, and batches without work."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardprep.formats.containers.container import Room
from shardprep.formats.dataset.record_set import RecordSet
from shardprep.formats.images.opencv import cv2
from shardprep.formats.records.record import Record
from shardprep.loaders.buffers.slots import Arrays, SlotLayout
from shardprep.loaders.engine.engine import Engine
from shardprep.loaders.engine.protocol.task import Clock, Fill, Items
from shardprep.loaders.loader.shard_task import item_dtype
from shardprep.loaders.order.rng import RecordRandom
from shardprep.loaders.transforms.contract import Transform, fill_rows, outputs_of

RECORDS_BYTES = 64 << 20  # of records that are read before they are transformed


def one_core_rate(dataset: RecordSet, transform: Transform, *, seconds: float) -> float:
    """Images per second that this thread makes of records in memory, evenly chosen from the dataset.

    OpenCV is limited to this thread during the measurement. Raises what the transform raises.
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


def _some(dataset: RecordSet) -> Sequence[Record]:
    mean = dataset.image_bytes / len(dataset)
    count = max(1, min(len(dataset), int(RECORDS_BYTES / max(1.0, mean))))
    return [dataset[place * len(dataset) // count] for place in range(count)]


@contextmanager
def _one_thread() -> Iterator[None]:
    before = cv2.getNumThreads()
    cv2.setNumThreads(0)
    try:
        yield
    finally:
        cv2.setNumThreads(before)


ITEM = item_dtype(32)


@dataclass(frozen=True)
class NullWork:
    """Work that does not write to its rows."""

    item_dtype: np.dtype[Any] = ITEM
    stages: tuple[str, ...] = ()

    @contextmanager
    def open(self, clock: Clock) -> Iterator[Fill]:
        yield _leave


def _leave(items: Items, arrays: Arrays, room: Room) -> Iterable[None]:
    return itertools.repeat(None, len(items))


def hand_over_rate(layout: SlotLayout, *, workers: int, slots: int, seconds: float) -> float:
    """Images per second of full batches of this layout that are delivered without any work."""
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
