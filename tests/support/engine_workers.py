"""The work of the tests' engines, defined here so that worker processes can import it."""

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from shardprep.formats.shards.read import Room
from shardprep.loaders.batches.slots import Arrays, SlotLayout
from shardprep.loaders.engine.messages import Clock, Fill, Items
from shardprep.loaders.transforms.contract import ArraySpec

Action = Callable[..., object]
INT64 = np.dtype(np.int64)


def layout(rows: int) -> SlotLayout:
    """Rows that contain their item twice: once small, once in every one of 64 pixels."""
    return SlotLayout(rows, (ArraySpec("number", (), "int64"), ArraySpec("pixels", (64,), "int32")))


@dataclass(frozen=True)
class Writing:
    """Write each item's number to its row, after the action that ``actions`` has for it."""

    actions: Mapping[int, Action] = field(default_factory=dict)
    at_opening: Action | None = None
    item_dtype: np.dtype[Any] = INT64
    stages: tuple[str, ...] = ("write",)

    @contextmanager
    def open(self, clock: Clock) -> Iterator[Fill]:
        if self.at_opening:
            self.at_opening(0)

        def fill(items: Items, arrays: Arrays, room: Room) -> Iterable[object]:
            for row, item in enumerate(items.tolist()):
                began = time.perf_counter()
                outcome = self.actions[item](item) if item in self.actions else None
                arrays["number"][row] = item
                arrays["pixels"][row] = item
                clock[0] += time.perf_counter() - began
                yield outcome

        yield fill


def sleep(seconds: float, *item: int) -> None:
    time.sleep(seconds)


doze, sleep_for_ever = partial(sleep, 0.2), partial(sleep, 3600.0)


def swell(item: int) -> bytes:
    time.sleep(0.5)
    return bytes(10 << 20)  # more than a socket takes


def wait_for(file: Path, item: int) -> None:
    while not file.exists():
        time.sleep(0.01)


def end_by(signal: int, *item: int) -> None:
    os.kill(os.getpid(), signal)


NUMBERS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP, signal.SIGUSR1, signal.SIGHUP)
kill, crash, stop, notify, hang_up = (partial(end_by, number) for number in NUMBERS)


def leave(*item: int) -> None:
    os._exit(0)


def refuse(item: int) -> None:
    raise KeyError(f"no such thing as {item}")


def refuse_strangely(item: int) -> None:
    class Strange(Exception):
        """A class that no other process can import."""

    raise Strange(f"strange {item}")


@dataclass(frozen=True)
class Once:
    """Do ``action`` on the first call, in any process."""

    marker: Path
    action: Callable[..., object]

    def __call__(self, *item: int) -> object:
        try:
            self.marker.touch(exist_ok=False)
        except FileExistsError:
            return None
        return self.action(*item)


@dataclass(frozen=True)
class Uneven:
    """Yield ``by`` outcomes more than there are rows; opening takes three pauses, taking a lease one."""

    by: int
    pause_s: float = 0.0
    stages: tuple[str, ...] = ()

    @property
    def item_dtype(self) -> np.dtype[Any]:
        time.sleep(self.pause_s)
        return INT64

    @contextmanager
    def open(self, clock: Clock) -> Iterator[Fill]:
        time.sleep(3 * self.pause_s)
        yield lambda items, arrays, room: [None] * (len(items) + self.by)
