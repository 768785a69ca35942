"""A map in processes: on the loader's workers and slots."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...formats.errors import UsageError
from ..batches import Batch
from ..engine import Engine
from ..loader import DEFAULT_SLOTS
from ..passes import end
from ..slots import Field, SlotLayout
from ..transforms import ArraySpec
from .batching_source import BatchingSource
from .map_work import MapWork
from .mapped import Mapped
from .node import Fetched
from .numbered import Asked, numbered
from .running import Pass
from .shipping import Shipping

ROWS = 64  # items in a slot, at most: a millisecond of the cheapest work
AHEAD = 2  # items for each worker in the smallest group, of which as many as there are slots are under way
SPARE = 4 << 20  # bytes for each result; address space, not memory, until it is written
CARGO = 4 << 30  # bytes for the items of a group; the same


@dataclass(frozen=True)
class ProcessMap(Mapped, BatchingSource):
    """``function`` of each item, in ``processes`` workers. See :meth:`.Flow.map`."""

    processes: int
    ordered: bool
    outputs: tuple[ArraySpec, ...] | None
    is_single: bool
    deadline: float | None

    def __post_init__(self) -> None:
        if operator.index(self.processes) < 1:
            raise UsageError(f"a map has at least 1 process, not {self.processes}")

    @property
    def can_pick(self) -> bool:
        return self.ordered and super().can_pick

    def results(self, now: Pass, numbers: Iterable[int] | None = None) -> Iterator[Any]:
        rows = max(ROWS, 2 * AHEAD * self.processes)
        for batch in self._batches(now, numbers, rows, AHEAD * self.processes):
            yield from self._values(batch)
            del batch

    @property
    def never_change(self) -> bool:
        return True  # each result was made by a worker, for nobody else

    def _values(self, batch: Batch) -> Iterator[Any]:
        for row in range(len(batch.items)):
            if row in batch.skipped:
                continue
            if self.outputs is None:
                yield restored(batch.payloads.pop(row))
            else:
                yield self._in_form([array[row, ...] for array in batch.arrays.values()])

    def _in_form(self, arrays: list[Any]) -> Any:
        return arrays[0] if self.is_single else tuple(arrays)

    @property
    def can_batch(self) -> bool:
        return self.outputs is not None and self.ordered and not self.drop_none

    def batches(self, now: Pass, size: int) -> Iterator[Any]:
        for batch in self._batches(now, None, size, size):
            arrays = list(batch.arrays.values())
            del batch
            held = [self._in_form(arrays)]
            del arrays
            yield held.pop()

    def _batches(self, now: Pass, numbers: Iterable[int] | None, rows: int, least: int) -> Iterator[Batch]:
        items, places = self._sent(now, numbers)
        shipping = Shipping(
            zip(items, places, strict=False),
            pass_number=now.number,
            rows=rows,
            least=least,
            room=CARGO,
            never_change=isinstance(self.source, Fetched) or self.source.never_change,
        )
        try:
            with (
                now.kept.borrowed(now.place(self), partial(self._engine, now, rows)) as engine,
                closing(engine.run(shipping)) as batches,  # type: ignore[type-var]
            ):
                yield from map(partial(_noted, shipping), batches)
        finally:
            end(items)

    def _sent(self, now: Pass, numbers: Iterable[int] | None) -> tuple[Iterator[Any], Iterator[int]]:
        """What the workers are sent, the items or what they fetch them by, and the number of each."""
        if not isinstance(self.source, Fetched):
            return numbered(self, now, numbers)
        asked = Asked(range(self.source.length.items) if numbers is None else numbers)
        return self.source.keys(now.of(self), asked), asked.again

    def _engine(self, now: Pass, rows: int) -> Engine:
        work = MapWork(
            function=self.function,
            fetch=self.source.fetch() if isinstance(self.source, Fetched) else None,
            outputs=self.outputs,
            drop_none=self.drop_none,
            stream=now.stream(self, self.seed) if self.random else None,
        )
        return Engine(
            work,
            layout_of(rows, self.outputs),
            workers=self.processes,
            slots=DEFAULT_SLOTS,
            deadline=self.deadline,
            ordered=self.ordered,
            describe=self._described,
        )

    def _described(self, item: Any) -> str:
        return f"item {item['number']} of pass {item['pass']}, at {self.label}"


def declared(outputs: ArraySpec | Sequence[ArraySpec] | None) -> tuple[ArraySpec, ...] | None:
    """Outputs as a tuple. Raises UsageError for anything but specs."""
    if outputs is None:
        return None
    specs = (outputs,) if isinstance(outputs, ArraySpec) else tuple(outputs)
    if not specs or not all(isinstance(spec, ArraySpec) for spec in specs):
        raise UsageError(f"outputs are an ArraySpec or a tuple of them, not {outputs!r}")
    return specs


def layout_of(rows: int, outputs: tuple[ArraySpec, ...] | None) -> SlotLayout:
    """A slot's, for results of the declared outputs, or of any size."""
    fields = tuple(Field(spec.name, spec.shape, spec.dtype) for spec in outputs or ())
    return SlotLayout(rows, fields, spare=0 if fields else SPARE, cargo=CARGO, sparse=True)


def _noted(shipping: Shipping, batch: Batch) -> Batch:
    shipping.delivered(len(batch.items))
    return batch


def restored(payload: object) -> object:
    """The result that a worker had."""
    return bytes(payload) if isinstance(payload, memoryview) else payload
