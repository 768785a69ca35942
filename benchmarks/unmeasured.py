"""The loader's work with all its clocks taken out, in the workers that it comes to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np

from shardprep.loaders import shard_work, transforms, worker
from shardprep.loaders.shard_work import ShardWork
from shardprep.loaders.work import Clock, Fill


@dataclass(frozen=True)
class MeasuredWork(ShardWork):
    """As it is; but that its worker, too, imports this module."""


@dataclass(frozen=True)
class UnmeasuredWork(ShardWork):
    """Opening it replaces what takes the time by the same without."""

    @contextmanager
    def open(self, clock: Clock) -> Iterator[Fill]:
        shard_work._Bench._outcome = outcome
        transforms.decode_rgb = decode
        worker._Desk = UnmeasuredDesk
        with super().open(clock) as fill:
            yield fill


class UnmeasuredDesk(worker._Desk):
    """A worker that counts no seconds."""

    def serve(self) -> None:
        while (message := self.channel.receive()) is not None:
            worker._say(self.channel, *self._answer(worker.unpack_lease(message, self.work.item_dtype)))
            self.board.lease[self.index] = worker.IDLE


def outcome(bench: Any, reader: Any, item: Any, arrays: Any, row: int, room: Any) -> object:
    """As shard_work has it, but for the clock."""
    transform = bench._work.transform
    if transform is None:
        return reader.image_in(item.ordinal, room, crc32c=item.crc32c)
    return bench._transformed(transform, bench._read(reader, item), item, arrays, row)


def decode(image: Any, *, orientation: str = "ignore", key: str | None = None) -> Any:
    """As decoding has it, but for the clock and errors."""
    flags = cv2.IMREAD_COLOR_RGB
    if orientation == "ignore":
        flags |= cv2.IMREAD_IGNORE_ORIENTATION
    return cv2.imdecode(np.frombuffer(image, np.uint8), flags)
