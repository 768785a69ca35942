"""The loader's work without any clocks in its workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np

from shardprep.loaders.engine import worker
from shardprep.loaders.engine.messages import Clock, Fill
from shardprep.loaders.loader import work as shard_task
from shardprep.loaders.loader.work import ShardWork
from shardprep.loaders.transforms import transforms


@dataclass(frozen=True)
class MeasuredWork(ShardWork):
    """The unchanged work, except that its worker also imports this module."""


@dataclass(frozen=True)
class UnmeasuredWork(ShardWork):
    """Work that, when opened, replaces all timed functions by untimed ones."""

    @contextmanager
    def open(self, clock: Clock) -> Iterator[Fill]:
        shard_task._ShardWorkspace._outcome = outcome
        transforms.decode_rgb = decode
        worker._WorkerLoop = UnmeasuredWorkerLoop
        with super().open(clock) as fill:
            yield fill


class UnmeasuredWorkerLoop(worker._WorkerLoop):
    """A worker's loop that counts no seconds."""

    def serve(self) -> None:
        while (message := self.channel.receive()) is not None:
            worker._send(self.channel, *self._answer(worker.unpack_lease(message, self.work.item_dtype)))
            self.status_table.lease[self.index] = worker.IDLE


def outcome(bench: Any, shard: Any, item: Any, arrays: Any, row: int) -> object:
    """Do the same as shard_task's function for a transform of images, without clocks."""
    return bench._transformed(bench._transform, bench._read(shard, item), item, arrays, row)


def decode(image: Any, *, orientation: str = "ignore", key: str | None = None) -> Any:
    """Do the same as transforms.decode_rgb, without clocks and errors."""
    flags = cv2.IMREAD_COLOR_RGB
    if orientation == "ignore":
        flags |= cv2.IMREAD_IGNORE_ORIENTATION
    return cv2.imdecode(np.frombuffer(image, np.uint8), flags)
