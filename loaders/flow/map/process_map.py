"""A map in processes, with the loader's workers and slots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from shardprep.formats.errors import UsageError
from shardprep.loaders.batching.passes import end
from shardprep.loaders.batching.stack import stack
from shardprep.loaders.buffers.memory import ALIGNMENT
from shardprep.loaders.buffers.row_form import RowForm
from shardprep.loaders.buffers.slots import SlotField, SlotLayout
from shardprep.loaders.engine.engine import Engine
from shardprep.loaders.engine.protocol.batch import EngineBatch
from shardprep.loaders.flow.core.checks import checked_int, seconds_of
from shardprep.loaders.flow.core.node import BatchingSource, Fetched
from shardprep.loaders.flow.core.numbering import PendingNumbers, numbered
from shardprep.loaders.flow.core.pass_context import PassContext
from shardprep.loaders.loader.loader import DEFAULT_SLOTS
from shardprep.loaders.transforms.contract import ArraySpec

from .engine_meter import EngineMeter
from .item_groups import ItemGroups
from .map import Mapped
from .map_task import MapWork
from .outcomes import restored

SLOT_ROWS = 64  # least capacity of a slot in items: about a millisecond of the cheapest work
ITEMS_PER_WORKER = 2  # in the smallest group; as many groups as there are slots are in progress
# bytes of address space for the inputs of a group and for its results; memory is used when they are written
INPUT_BYTES = RESULT_BYTES = 4 << 30


@dataclass(frozen=True)
class ProcessMap(Mapped, BatchingSource):
    """``function`` of each item, in ``processes`` worker processes. See :meth:`.Flow.map`."""

    processes: int
    ordered: bool
    outputs: tuple[ArraySpec, ...] | None
    is_single: bool
    deadline: float | None

    def __post_init__(self) -> None:
        super().__post_init__()
        checked_int(self.processes, "processes", least=1)
        if self.deadline is not None:
            seconds_of(self.deadline, "a deadline", above=0)

    @property
    def can_pick(self) -> bool:
        return self.ordered and super().can_pick

    def results(self, now: PassContext, numbers: Iterable[int] | None = None) -> Iterator[Any]:
        rows = max(SLOT_ROWS, 2 * ITEMS_PER_WORKER * self.processes)
        items, groups = self._grouped(now, numbers, rows, ITEMS_PER_WORKER * self.processes)
        with closing(self._received(now, items, groups)) as received:  # type: ignore[type-var]
            for batch in received:
                yield from self._values(batch)
                del batch

    def _values(self, batch: EngineBatch) -> Iterator[Any]:
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

    def batches(self, now: PassContext, size: int, *, least: int) -> Iterator[Any]:
        items, groups = self._grouped(now, None, size, size)
        with closing(self._received(now, items, groups)) as received:  # type: ignore[type-var]
            yield from map(self._made(now, groups), filter(partial(self._is_enough, least), received))

    def _made(self, now: PassContext, groups: ItemGroups) -> Callable[[EngineBatch], Any]:
        """The function that makes a batch from what the workers sent."""
        if self.outputs is not None:
            return self._whole
        known = now.kept.shared(now.place(self), KnownForm)
        groups.form = known.form
        return partial(self._stacked, groups, known)

    def _is_enough(self, least: int, batch: EngineBatch) -> bool:
        """Whether the batch has ``least`` items. Raises an item's exception, also where it has fewer."""
        for row, payload in batch.payloads.items():
            restored(payload, partial(self._described, batch.items[row]))
        return len(batch.items) >= least

    def _whole(self, batch: EngineBatch) -> Any:
        return self._in_form(list(batch.arrays.values()))

    def _stacked(self, groups: ItemGroups, known: KnownForm, batch: EngineBatch) -> Any:
        """The batch that the workers have written, or the results stacked here.

        The workers get the form of stacked results for the next batches.
        """
        form = groups.forms.popleft()
        if form and not batch.payloads:
            return form.made_of(batch.arrays)
        rows = [self._row(batch, row, form) for row in range(len(batch.items))]
        groups.form = known.form = RowForm.of(rows[0])
        return stack(rows)

    def _row(self, batch: EngineBatch, row: int, form: RowForm | None) -> Any:
        if row in batch.payloads or form is None:
            return restored(batch.payloads[row], partial(self._described, batch.items[row]))
        return form.made_of({name: array[row, ...] for name, array in batch.arrays.items()})

    def _grouped(
        self, now: PassContext, numbers: Iterable[int] | None, rows: int, least: int
    ) -> tuple[Iterator[Any], ItemGroups]:
        items, places = self._keys(now, numbers)
        groups = ItemGroups(
            zip(items, places, strict=False),
            pass_number=now.number,
            rows=rows,
            least=least,
            max_bytes=INPUT_BYTES,
            never_change=isinstance(self.source, Fetched) or self.source.never_change,
        )
        return items, groups

    def _keys(self, now: PassContext, numbers: Iterable[int] | None) -> tuple[Iterator[Any], Iterator[int]]:
        """Two iterators: over the items, or the keys of fetched items, to send; and over their numbers."""
        if not isinstance(self.source, Fetched):
            return numbered(self, now, numbers)
        asked = PendingNumbers(range(self.source.length.items) if numbers is None else numbers)
        return self.source.keys(now.of(self), asked), asked.again

    def _received(self, now: PassContext, items: Iterator[Any], groups: ItemGroups) -> Iterator[EngineBatch]:
        make = partial(self._engine, now, groups.rows)
        try:
            with (
                now.kept.borrowed((now.place(self), groups.rows), make) as engine,
                now.meter.group(now.place(self), partial(self._meter, now)).run(engine, groups) as batches,
            ):
                yield from map(partial(_counted, groups), batches)
        finally:
            end(items)

    def _meter(self, now: PassContext) -> EngineMeter:
        fetch = {"fetch": self.source.label} if isinstance(self.source, Fetched) else {}
        stages = fetch | {"map": self.label}
        return EngineMeter(self.label, self.processes, stages=stages, rest="transport", consumer=now.here)

    def _engine(self, now: PassContext, rows: int) -> Engine:
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
            owner="Flow",
        )

    def _described(self, item: Any) -> str:
        return f"item {item['number']} of pass {item['pass']}, at {self.label}"


class KnownForm:
    """The form of a step's results, kept between passes."""

    form: RowForm | None = None

    def close(self) -> None:
        self.form = None


def declared(outputs: ArraySpec | Sequence[ArraySpec] | None) -> tuple[ArraySpec, ...] | None:
    """Return the outputs as a tuple. Raises UsageError for values that are no valid specs."""
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
    """The layout of a slot for results of the declared outputs, or of any size."""
    fields = tuple(SlotField(spec.name, spec.shape, spec.dtype) for spec in outputs or ())
    return SlotLayout(
        rows, fields, spare=0 if fields else result_bytes(rows), inputs=INPUT_BYTES, sparse=True
    )


def result_bytes(rows: int) -> int:
    """The bytes of address space for each of ``rows`` results."""
    return RESULT_BYTES // rows // ALIGNMENT * ALIGNMENT


def _counted(groups: ItemGroups, batch: EngineBatch) -> EngineBatch:
    groups.delivered(len(batch.items), batch.payload_bytes)
    return batch
