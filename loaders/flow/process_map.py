"""A map in processes: on the loader's workers and slots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ...formats.errors import UsageError
from ..batches import Batch
from ..engine import Engine
from ..loader import DEFAULT_SLOTS
from ..memory import ALIGNMENT
from ..passes import end
from ..slots import Field, SlotLayout
from ..stacking import stack
from ..transforms import ArraySpec
from .batching_source import BatchingSource
from .form import Form
from .map_work import MapWork
from .mapped import Mapped
from .node import Fetched
from .numbered import Asked, numbered
from .results import restored
from .running import Pass
from .seconds import seconds_of
from .shipping import Shipping
from .whole import whole

ROWS = 64  # items in a slot, at most: a millisecond of the cheapest work
AHEAD = 2  # items for each worker in the smallest group, of which as many as there are slots are under way
# bytes for the items of a group, and for what becomes of them: addresses, no memory until they are written
CARGO = RESULTS = 4 << 30


@dataclass(frozen=True)
class ProcessMap(Mapped, BatchingSource):
    """``function`` of each item, in ``processes`` workers. See :meth:`.Flow.map`."""

    processes: int
    ordered: bool
    outputs: tuple[ArraySpec, ...] | None
    is_single: bool
    deadline: float | None

    def __post_init__(self) -> None:
        super().__post_init__()
        whole(self.processes, "processes", least=1)
        if self.deadline is not None:
            seconds_of(self.deadline, "a deadline", above=0)

    @property
    def can_pick(self) -> bool:
        return self.ordered and super().can_pick

    def results(self, now: Pass, numbers: Iterable[int] | None = None) -> Iterator[Any]:
        rows = max(ROWS, 2 * AHEAD * self.processes)
        items, shipping = self._sent(now, numbers, rows, AHEAD * self.processes)
        with closing(self._received(now, items, shipping)) as received:  # type: ignore[type-var]
            for batch in received:
                yield from self._values(batch)
                del batch

    def _values(self, batch: Batch) -> Iterator[Any]:
        for row in range(len(batch.items)):
            if row in batch.payloads:
                yield restored(batch.payloads.pop(row), partial(self._described, batch.items[row]))
            elif row not in batch.skipped:
                yield self._in_form([array[row, ...] for array in batch.arrays.values()])

    def _in_form(self, arrays: list[Any]) -> Any:
        return arrays[0] if self.is_single else tuple(arrays)

    @property
    def can_batch(self) -> bool:
        return self.ordered and not self.drop_none

    def batches(self, now: Pass, size: int, *, least: int) -> Iterator[Any]:
        items, shipping = self._sent(now, None, size, size)
        with closing(self._received(now, items, shipping)) as received:  # type: ignore[type-var]
            yield from map(self._made(now, shipping), filter(partial(self._is_enough, least), received))

    def _made(self, now: Pass, shipping: Shipping) -> Callable[[Batch], Any]:
        """What makes one of what the workers sent."""
        if self.outputs is not None:
            return self._whole
        learnt = now.kept.shared(now.place(self), Learnt)
        shipping.form = learnt.form
        return partial(self._stacked, shipping, learnt)

    def _is_enough(self, least: int, batch: Batch) -> bool:
        """Raises what an item raised, also one of too few."""
        for row, payload in batch.payloads.items():
            restored(payload, partial(self._described, batch.items[row]))
        return len(batch.items) >= least

    def _whole(self, batch: Batch) -> Any:
        return self._in_form(list(batch.arrays.values()))

    def _stacked(self, shipping: Shipping, learnt: Learnt, batch: Batch) -> Any:
        """What the workers have written, or else what it takes to stack; they learn the form of that."""
        form = shipping.forms.popleft()
        if form and not batch.payloads:
            return form.made_of(batch.arrays)
        rows = [self._row(batch, row, form) for row in range(len(batch.items))]
        shipping.form = learnt.form = Form.of(rows[0])
        return stack(rows)

    def _row(self, batch: Batch, row: int, form: Form | None) -> Any:
        if row in batch.payloads or form is None:
            return restored(batch.payloads[row], partial(self._described, batch.items[row]))
        return form.made_of({name: array[row, ...] for name, array in batch.arrays.items()})

    def _sent(
        self, now: Pass, numbers: Iterable[int] | None, rows: int, least: int
    ) -> tuple[Iterator[Any], Shipping]:
        items, places = self._keys(now, numbers)
        shipping = Shipping(
            zip(items, places, strict=False),
            pass_number=now.number,
            rows=rows,
            least=least,
            room=CARGO,
            never_change=isinstance(self.source, Fetched) or self.source.never_change,
        )
        return items, shipping

    def _keys(self, now: Pass, numbers: Iterable[int] | None) -> tuple[Iterator[Any], Iterator[int]]:
        """What the workers are sent, the items or what they fetch them by, and the number of each."""
        if not isinstance(self.source, Fetched):
            return numbered(self, now, numbers)
        asked = Asked(range(self.source.length.items) if numbers is None else numbers)
        return self.source.keys(now.of(self), asked), asked.again

    def _received(self, now: Pass, items: Iterator[Any], shipping: Shipping) -> Iterator[Batch]:
        make = partial(self._engine, now, shipping.rows)
        try:
            with (
                now.kept.borrowed((now.place(self), shipping.rows), make) as engine,
                closing(engine.run(shipping)) as batches,  # type: ignore[type-var]
            ):
                yield from map(partial(_noted, shipping), batches)
        finally:
            end(items)

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


class Learnt:
    """The form of a step's results, from one pass to the next."""

    form: Form | None = None

    def close(self) -> None:
        self.form = None


def declared(outputs: ArraySpec | Sequence[ArraySpec] | None) -> tuple[ArraySpec, ...] | None:
    """Outputs as a tuple. Raises UsageError for anything but specs."""
    if outputs is None:
        return None
    specs = (outputs,) if isinstance(outputs, ArraySpec) else outputs
    if not isinstance(specs, Sequence) or not specs or not all(isinstance(spec, ArraySpec) for spec in specs):
        raise UsageError(f"outputs are an ArraySpec or a tuple of them, not {outputs!r}")
    try:
        np.empty((0, *(side for spec in specs for side in spec.shape)))
        layout_of(1, tuple(specs))
    except (TypeError, ValueError) as error:
        raise UsageError(f"numpy has no arrays as the outputs declare them: {error}") from error
    return tuple(specs)


def layout_of(rows: int, outputs: tuple[ArraySpec, ...] | None) -> SlotLayout:
    """A slot's, for results of the declared outputs, or of any size."""
    fields = tuple(Field(spec.name, spec.shape, spec.dtype) for spec in outputs or ())
    return SlotLayout(rows, fields, spare=0 if fields else room_of(rows), cargo=CARGO, sparse=True)


def room_of(rows: int) -> int:
    """Bytes for each of so many results."""
    return RESULTS // rows // ALIGNMENT * ALIGNMENT


def _noted(shipping: Shipping, batch: Batch) -> Batch:
    shipping.delivered(len(batch.items), batch.payload_bytes)
    return batch
