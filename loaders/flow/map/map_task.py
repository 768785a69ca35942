"""The task of a map's workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import starmap
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from shardprep.formats.containers.container import Room
from shardprep.formats.errors import UsageError
from shardprep.formats.processes.one_thread import use_one_thread
from shardprep.loaders.buffers.memory import keep_freed_memory
from shardprep.loaders.buffers.slots import INPUTS, Arrays
from shardprep.loaders.engine.protocol.task import Clock, Fill, Items, Skipped
from shardprep.loaders.engine.protocol.written_rows import RowWriter
from shardprep.loaders.flow.core.node import Fetch
from shardprep.loaders.flow.core.pass_context import StepRandom
from shardprep.loaders.flow.core.user_function import Function
from shardprep.loaders.order.rng import ItemRandom
from shardprep.loaders.transforms.contract import ArraySpec

from .item_groups import ITEM, received
from .outcomes import outcome_of, raised


@dataclass(frozen=True)
class MapWork:
    """Calls ``function`` for each item, or for what ``fetch`` makes from its key. Picklable."""

    function: Function
    fetch: Fetch | None
    outputs: tuple[ArraySpec, ...] | None
    drop_none: bool
    stream: StepRandom | None

    @property
    def item_dtype(self) -> np.dtype[Any]:
        return ITEM

    @property
    def stages(self) -> tuple[str, ...]:
        return "receive", "fetch", "map"

    @contextmanager
    def open(self, clock: Clock) -> Iterator[Fill]:
        use_one_thread()
        keep_freed_memory()
        with ExitStack() as opened:
            item_of = opened.enter_context(self.fetch.open()) if self.fetch else None
            yield _MapWorkspace(self, item_of, clock).fill


class _MapWorkspace:
    def __init__(self, work: MapWork, item_of: Callable[[Any], Any] | None, clock: Clock) -> None:
        self._work = work
        self._item_of = item_of
        self._clock = clock
        self._random = ItemRandom(work.stream.bits(0)) if work.stream else None

    def fill(self, items: Items, arrays: Arrays, room: Room) -> Iterator[object]:
        rows = _Rows(self._work, items, arrays)
        receiving = fetching = mapping = 0.0
        for row, item in enumerate(starmap(_Item, items.tolist())):
            began = got = fetched = perf_counter()
            try:
                key = received(rows.inputs, item.at, item.size)
                got = fetched = perf_counter()
                value = self._item_of(key) if self._item_of else key
                fetched = perf_counter()
                outcome = rows.outcome(self._result(value, item), row, item.row)
            except (
                BaseException
            ) as error:  # SystemExit, too, is raised at this item, after the results before it
                outcome = raised(error)
            receiving, fetching = receiving + got - began, fetching + fetched - got
            mapping += perf_counter() - fetched
            yield outcome
        self._clock[:] += receiving, fetching, mapping

    def _result(self, value: Any, item: _Item) -> Any:
        rng = (self._random(item.pass_number, item.number),) if self._random else ()
        return self._work.function(value, *rng)


class _Item(NamedTuple):
    pass_number: int
    number: int
    at: int
    size: int
    row: int
    rows: int
    form_at: int
    form_size: int


class _Rows:
    """The rows that the results of a lease are written to."""

    def __init__(self, work: MapWork, items: Items, arrays: Arrays) -> None:
        self.inputs = arrays.pop(INPUTS)
        self._work = work
        self._declared = list(arrays.values())
        self._written = RowWriter(items, self.inputs)

    def outcome(self, result: Any, row: int, row_of_batch: int) -> object:
        """The outcome to yield for a result. The result is written to its row if its form is known."""
        if result is None:
            return _dropped(self._work.drop_none)
        if self._work.outputs is not None:
            _write(result, self._work.outputs, [array[row, ...] for array in self._declared])
            return None
        return None if self._written.write(result, row_of_batch) else outcome_of(result)


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
