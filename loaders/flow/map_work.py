"""What the workers of a map do."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from ...formats.errors import UsageError
from ...formats.shard import Room
from ..heap import keep_freed_memory
from ..slots import CARGO, Arrays
from ..transforms import ArraySpec
from ..work import Clock, Fill, Items, Skipped, Whole
from .functions import Function
from .node import Fetch
from .running import Stream
from .shipping import ITEM, received


@dataclass(frozen=True)
class MapWork:
    """Calls ``function`` for each item, or for what ``fetch`` makes of it. Picklable."""

    function: Function
    fetch: Fetch | None
    outputs: tuple[ArraySpec, ...] | None
    drop_none: bool
    stream: Stream | None

    @property
    def item_dtype(self) -> np.dtype[Any]:
        return ITEM

    @property
    def stages(self) -> tuple[str, ...]:
        return "receive", "map"

    @contextmanager
    def open(self, clock: Clock) -> Iterator[Fill]:
        use_one_thread()
        with ExitStack() as opened:
            item_of = opened.enter_context(self.fetch.open()) if self.fetch else None
            yield _Bench(self, item_of, clock).fill


@dataclass(frozen=True)
class _Bench:
    work: MapWork
    item_of: Callable[[Any], Any] | None
    clock: Clock

    def fill(self, items: Items, arrays: Arrays, room: Room) -> Iterator[object]:
        cargo, receiving, mapping = arrays.pop(CARGO), 0.0, 0.0
        for row, (pass_number, number, at, size) in enumerate(items.tolist()):
            began = perf_counter()
            item = received(cargo, at, size)
            got = perf_counter()
            outcome = self._outcome(item, pass_number, number, arrays, row)
            receiving, mapping = receiving + got - began, mapping + perf_counter() - got
            del item
            yield outcome
        self.clock[:] += receiving, mapping

    def _outcome(self, item: Any, pass_number: int, number: int, arrays: Arrays, row: int) -> object:
        item = self.item_of(item) if self.item_of else item
        stream = self.work.stream
        result = (
            self.work.function(item, stream.rng(pass_number, number)) if stream else self.work.function(item)
        )
        if result is None:
            return _dropped(self.work.drop_none)
        if self.work.outputs is None:
            return outcome_of(result)
        _write(result, self.work.outputs, [array[row, ...] for array in arrays.values()])
        return None


def outcome_of(result: Any) -> object:
    """What a worker yields, for the result to arrive as what it is."""
    return result if type(result) in (np.ndarray, bytes) else Whole(result)


def use_one_thread() -> None:
    """Leave the cores to the other workers, and keep memory as image workers do."""
    if (cv2 := sys.modules.get("cv2")) is not None:
        cv2.setNumThreads(0)
    keep_freed_memory()


def _dropped(drop_none: bool) -> Skipped:
    if not drop_none:
        raise UsageError("the function returned None; with drop_none=True such items are left out")
    return Skipped("None")


def _write(result: Any, outputs: tuple[ArraySpec, ...], rows: list[Any]) -> None:
    arrays = result if isinstance(result, tuple) else (result,)
    found = [(np.shape(array), np.asarray(array).dtype) for array in arrays]
    if found != [(spec.shape, np.dtype(spec.dtype)) for spec in outputs]:
        returned = ", ".join(f"{dtype}{list(shape)}" for shape, dtype in found)
        declared = ", ".join(f"{spec.dtype}{list(spec.shape)}" for spec in outputs)
        raise UsageError(f"the function returned {returned}, where outputs declare {declared}")
    for array, row in zip(arrays, rows, strict=True):
        row[...] = array
