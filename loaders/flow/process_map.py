"""Steps in worker processes, on the loader's workers and slots: a map, and whole passes of a source."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from itertools import count, islice
from operator import is_not
from time import perf_counter
from typing import Any

import numpy as np

from shardprep.formats.errors import UsageError
from shardprep.formats.shards.read import Room
from shardprep.loaders.batches.passes import end_pass, ending
from shardprep.loaders.batches.pickling import ALIGNMENT, PickledValue, round_up, unpickle
from shardprep.loaders.batches.slots import INPUTS, Arrays, RowForm, SlotLayout
from shardprep.loaders.batches.stack import stack
from shardprep.loaders.engine.dispatcher import BatchRequest, Plan
from shardprep.loaders.engine.engine import Engine, EngineStats
from shardprep.loaders.engine.messages import (
    ROW_COLUMNS,
    Clock,
    EngineBatch,
    Fill,
    Items,
    RowWriter,
    SkippedRow,
    pack_error,
    unpack_error,
)
from shardprep.loaders.flow.map import Map
from shardprep.loaders.flow.node import Fetch, Function, Node, PassContext, PassResources, Step, share_numbers
from shardprep.loaders.loader.loader import DEFAULT_SLOTS
from shardprep.loaders.loader.stats import GroupTimes
from shardprep.loaders.order.rng import ItemRandom
from shardprep.loaders.transforms.contract import ArraySpec, write_rows

# An item's position in the inputs, and its row. Items of size 0 have no input: see InProcess.
ITEM = np.dtype([("pass", "<u8"), ("number", "<u8"), ("at", "<u8"), ("size", "<u8"), *ROW_COLUMNS])
GROUP_WORK_S = 0.05  # work in a group for all workers together, so that its messages cost little
GROUP_TIMEOUT_S = 0.02  # time after which an incomplete group is sent if items come slowly
GROUP_BYTES = 64 << 20  # bytes of items or results that fill a group, so that slots stay small


class EngineMeter:
    """The times of the engines that a step uses in a pass; ``rest`` names time outside of ``stages``."""

    def __init__(self, name: str, processes: int, stages: Mapping[str, str], rest: str) -> None:
        self._names, self._rest = stages, rest
        # of ended engines, and the current engine with its stats at the start; one tuple, for other threads
        self._times: tuple[GroupTimes, tuple[Engine, EngineStats] | None]
        self._times = GroupTimes(name, "worker", processes), None

    @contextmanager
    def run(
        self, engine: Engine, plans: Iterable[Plan], consumer: GroupTimes
    ) -> Iterator[Iterator[EngineBatch]]:
        """Run the engine within the context. Its waits count for the ``consumer``'s thread."""
        waited, self._times = engine.meter.waiting, (self._times[0], (engine, engine.stats()))

        def count_wait(batch: EngineBatch) -> EngineBatch:
            nonlocal waited
            before, waited = waited, engine.meter.waiting
            consumer.starved += waited - before
            return batch

        try:
            with ending(engine.run(plans)) as batches:
                yield map(count_wait, batches)
        finally:
            self._times = self.read(), None

    def read(self) -> GroupTimes:
        past, current = self._times
        if current is None:
            return past
        stats = current[0].stats().since(current[1])
        starved = sum(stats.waiting) / len(stats.waiting)
        return past.plus(GroupTimes.of_engine(stats, past.name, past.width, self._names, self._rest, starved))


@dataclass
class ItemGroups:
    """The ``numbered_items`` of a pass in groups of at most ``rows``, as requests to an engine.

    Groups have the given ``sizes``, each drawn after its group's first item. Without sizes they grow from
    ``least`` items with the rate of the results. Once the ``row_form`` of the results is known, the workers
    write the rows of a batch. An exception in ``numbered_items`` is raised after the group before it.
    """

    numbered_items: Iterator[tuple[Any, int]]
    _: KW_ONLY
    pass_number: int
    rows: int
    least: int  # at most ``rows``
    items_never_change: bool
    row_form: Callable[[], RowForm | None]
    sizes: Iterator[int] | None = None
    began: float = field(default_factory=perf_counter)
    delivered: int = 0  # results
    payload_bytes: int = 0  # of the results

    def count(self, batch: EngineBatch) -> EngineBatch:
        self.delivered += len(batch.items)
        self.payload_bytes += batch.payload_bytes
        return batch

    def __iter__(self) -> Iterator[BatchRequest]:
        numbers, inputs, end, size = list[int](), list[tuple[int, PickledValue]](), 0, 0
        full_at = perf_counter() + GROUP_TIMEOUT_S
        try:
            for item, number in self.numbered_items:
                size = size or (self._size() if self.sizes is None else next(self.sizes))
                piece = self._pickle(item, number, room=INPUT_BYTES - end)
                numbers.append(number)
                inputs.append((end, piece))
                end = round_up(end + piece.size)
                if len(numbers) >= size or (
                    self.sizes is None and (end >= GROUP_BYTES or perf_counter() >= full_at)
                ):
                    del item, piece
                    yield self._request(numbers, inputs, end)
                    numbers, inputs, end, size = [], [], 0, 0
                    full_at = perf_counter() + GROUP_TIMEOUT_S
        except Exception:  # raised again once the items before it are sent
            if numbers:
                yield self._request(numbers, inputs, end)
            raise
        if numbers:
            yield self._request(numbers, inputs, end)

    def _pickle(self, item: Any, number: int, *, room: int) -> PickledValue:
        try:
            piece = PickledValue.of(item, copy=not self.items_never_change)
        except Exception as error:
            raise UsageError(
                f"item {number}, a {type(item).__name__}, cannot be sent to another process: {error}. Create it "
                "in the function, from values that can be sent"
            ) from error
        if piece.size > room:
            raise UsageError(
                f"item {number} has {piece.size / 2**30:.1f} GiB; with the other items of its group that exceeds "
                f"the limit of {INPUT_BYTES / 2**30:.0f} GiB. Read its data in the function"
            )
        return piece

    def _request(self, numbers: list[int], inputs: list[tuple[int, PickledValue]], end: int) -> BatchRequest:
        items = np.zeros(len(numbers), ITEM)
        items["pass"], items["number"] = self.pass_number, numbers
        items["at"], items["size"] = zip(*((at, piece.size) for at, piece in inputs), strict=True)
        return BatchRequest(items, tuple(inputs)).with_rows(self.row_form(), at=end, room=INPUT_BYTES)

    def _size(self) -> int:
        """Return the size of the next group; sizes double, so that slots seldom change layout."""
        worth = GROUP_WORK_S / max(1e-9, perf_counter() - self.began)
        wanted = self.delivered * min(worth, GROUP_BYTES / max(1, self.payload_bytes))
        doublings = max(1, int(wanted // self.least)).bit_length() - 1
        return min(self.least << doublings, self.rows)


@dataclass(frozen=True)
class PackedError:
    """A packed exception in place of a result, so that the results before it come first."""

    packed: bytes


def pack_result(result: Any) -> object:
    """Return the outcome of a row for its result. Raises UsageError if the result cannot be sent."""
    if type(result) is bytes or (type(result) is np.ndarray and not result.dtype.hasobject):
        return result
    try:
        return PickledValue.of(result)
    except Exception as error:
        raise UsageError(
            f"a result, a {type(result).__name__}, cannot be sent from another process: {error}. Return what can "
            "be pickled, or use threads"
        ) from error


def take_result(batch: EngineBatch, row: int, describe: Callable[[Any], str]) -> Any:
    """Remove a row's result from the batch and return it, or raise the worker's exception with a note."""
    payload = batch.payloads.pop(row)
    if isinstance(payload, PackedError):
        error = unpack_error(payload.packed, describe(batch.items[row]))
        # a generator cannot raise StopIteration
        raise RuntimeError("\n".join(error.__notes__)) if isinstance(error, StopIteration) else error
    return bytes(payload) if isinstance(payload, memoryview) else payload


END_OF_PASS = SkippedRow("the pass has no more items")


@dataclass(frozen=True)
class MapWork:
    """Calls ``function`` for each item, or for the item that ``fetch`` makes from a key. Picklable.

    Without a function it returns the items unchanged, then END_OF_PASS. ``bits`` is the random stream
    of any of the items.
    """

    fetch: Fetch | None
    function: Function | None = None
    outputs: tuple[ArraySpec, ...] | None = None
    drop_none: bool = False
    bits: np.random.Philox | None = None

    item_dtype = ITEM
    stages = ("receive", "fetch", "map")

    @contextmanager
    def open(self, clock: Clock) -> Iterator[Fill]:
        with ExitStack() as opened:
            item_of = opened.enter_context(self.fetch()) if self.fetch else None
            yield partial(self._fill, item_of, ItemRandom(self.bits) if self.bits else None, clock)

    def _fill(
        self,
        item_of: Callable[[Any], Any] | None,
        random: ItemRandom | None,
        clock: Clock,
        items: Items,
        arrays: Arrays,
        room: Room | None,
    ) -> Iterator[object]:
        inputs = arrays.pop(INPUTS)
        writer, declared = RowWriter(items, inputs), list(arrays.values())
        receiving = fetching = mapping = 0.0
        for row, (number_of_pass, number, at, size, place, *_) in enumerate(items.tolist()):
            began = got = fetched = perf_counter()
            try:
                # copied, so that a second attempt sees the original
                key = unpickle(inputs[at : at + size], copy=True) if size else (number_of_pass, at, number)
                got = fetched = perf_counter()
                value = item_of(key) if item_of else key
                fetched = perf_counter()
                if self.function is None:
                    outcome = value if value is END_OF_PASS else pack_result(value)
                else:
                    rng = (random(number_of_pass, number),) if random else ()
                    rows = [array[row, ...] for array in declared]
                    outcome = self._finish_row(self.function(value, *rng), rows, writer, place)
            except BaseException as error:  # SystemExit, too: reported after the results before it
                outcome = PickledValue.of(PackedError(pack_error(error)))
            receiving, fetching = receiving + got - began, fetching + fetched - got
            mapping += perf_counter() - fetched
            yield outcome
        clock[:] += receiving, fetching, mapping

    def _finish_row(self, result: Any, rows: list[Any], writer: RowWriter, place: int) -> object:
        """Return the outcome for a result, after writing the result to its row if its form is known."""
        if result is None:
            if self.drop_none:
                return SkippedRow("None")
            raise UsageError("the function returned None; with drop_none=True such items are left out")
        if self.outputs is not None:
            write_rows(result, rows, "the function")
            return None
        return None if writer.write(result, place) else pack_result(result)


SLOT_ROWS = 64  # minimum items per slot: about a millisecond of the cheapest work
ITEMS_PER_WORKER = 2  # in the smallest group; one group per slot is in progress
# address space for a group's inputs and for its results, in bytes; memory is used only when written
INPUT_BYTES = RESULT_BYTES = 4 << 30


@dataclass(frozen=True)
class ProcessMap(Map):
    """``function`` of each item, in ``processes`` worker processes. See :meth:`.Flow.map`."""

    _: KW_ONLY
    processes: int
    outputs: tuple[ArraySpec, ...] | None
    is_single: bool
    deadline: float | None

    def pick(self, ctx: PassContext, numbers: Iterable[int] | None = None) -> Iterator[Any]:
        form, least = self.form, ITEMS_PER_WORKER * self.processes
        with ending(self._receive(ctx, numbers, max(SLOT_ROWS, 2 * least), least)) as received:
            for batch in received:
                for row in range(len(batch.items)):
                    if row in batch.payloads:
                        yield take_result(batch, row, self._describe)
                    elif form and row not in batch.skipped:
                        yield form.make_batch({name: array[row, ...] for name, array in batch.arrays.items()})
                del batch

    @property
    def form(self) -> RowForm | None:
        if self.outputs is None:
            return None
        return RowForm("array" if self.is_single else "tuple", self.outputs)

    def batches(
        self, ctx: PassContext, numbers: Iterable[int] | None, sizes: Iterator[int], size: int, *, least: int
    ) -> Iterator[Any]:
        """Yield batches of these ``sizes``, at most ``size``; leave out those with fewer than ``least``."""
        forms, key = ctx.resources.values, ctx.key_of(self)
        stack_rows = ctx.annotate_errors(f"batch({size})", lambda rows, _: stack(rows))

        def make_batch(batch: EngineBatch) -> Any:
            """Return the batch that the workers wrote, or stack the results, and keep their form.

            Raises an item's exception. Returns None for fewer than ``least`` rows.
            """
            results = {row: take_result(batch, row, self._describe) for row in list(batch.payloads)}
            if len(batch.items) < least:
                return None
            form = self.form or batch.form
            if form and not results:
                return form.make_batch(batch.arrays)
            rows = [results[row] if row in results else batch.result(row) for row in range(len(batch.items))]
            forms[key] = RowForm.of(rows[0])
            return stack_rows(rows, int(batch.items[0]["number"]) // size)

        with ending(self._receive(ctx, numbers, size, size, sizes, lambda: forms.get(key))) as received:
            yield from filter(partial(is_not, None), map(make_batch, received))

    def _receive(
        self,
        ctx: PassContext,
        numbers: Iterable[int] | None,
        rows: int,
        least: int,
        sizes: Iterator[int] | None = None,
        row_form: Callable[[], RowForm | None] = lambda: None,
    ) -> Iterator[EngineBatch]:
        """Yield the results of groups of items. If the source can fetch, keys are sent instead of items."""
        fetch = self.source.fetch
        if fetch:
            drawn, places = share_numbers(range(self.source.length.items) if numbers is None else numbers, 2)
            items = self.source.keys(ctx.for_source(self), drawn)
        else:
            items, places = self.number_items(ctx, numbers)
        groups = ItemGroups(
            zip(items, places, strict=False),
            pass_number=ctx.number,
            rows=rows,
            least=least,
            items_never_change=bool(fetch) or self.source.items_never_change,
            row_form=row_form,
            sizes=sizes,
        )
        stages = ({"fetch": self.source.label} if fetch else {}) | {"map": self.label}
        meter = ctx.meter.groups.setdefault(
            ctx.key_of(self), EngineMeter(self.label, self.processes, stages, "transport")
        )
        with (
            ending(items),
            ctx.resources.borrow((ctx.key_of(self), rows), partial(self._engine, ctx, rows)) as engine,
            meter.run(engine, groups, ctx.times) as batches,
        ):
            yield from map(groups.count, batches)

    def _engine(self, ctx: PassContext, rows: int) -> Engine:
        work = MapWork(
            self.source.fetch,
            self.function,
            self.outputs,
            self.drop_none,
            ctx.bits(self, self.seed) if self.random else None,
        )
        return Engine(
            work,
            layout_of(rows, self.outputs),
            workers=self.processes,
            slots=DEFAULT_SLOTS,
            deadline=self.deadline,
            ordered=self.ordered,
            describe=self._describe,
            owner="Flow",
        )

    def _describe(self, item: Any) -> str:
        return f"item {item['number']} of pass {item['pass']}, at {self.label}"


def check_map_outputs(outputs: ArraySpec | Sequence[ArraySpec] | None) -> tuple[ArraySpec, ...] | None:
    """Return the outputs as a tuple. Raises UsageError for invalid specs."""
    if outputs is None:
        return None
    specs = (outputs,) if isinstance(outputs, ArraySpec) else outputs
    if not isinstance(specs, Sequence) or not specs or not all(isinstance(spec, ArraySpec) for spec in specs):
        raise UsageError(f"outputs are an ArraySpec or a tuple of them, not {outputs!r}")
    layout_of(1, tuple(specs))  # raises for two of one name
    return tuple(specs)


def layout_of(rows: int, outputs: tuple[ArraySpec, ...] | None) -> SlotLayout:
    """Return the layout of a slot for the declared outputs, or for results of any size."""
    spare = 0 if outputs else RESULT_BYTES // rows // ALIGNMENT * ALIGNMENT
    return SlotLayout(rows, outputs or (), spare=spare, inputs=INPUT_BYTES, sparse=True)


PASS_SLOTS = 4


@dataclass(frozen=True)
class PassFetch:
    """Makes items of ``node``, at ``branch`` in its flow, from (pass, run, number), then END_OF_PASS."""

    node: Node
    branch: tuple[int, ...]

    @contextmanager
    def open(self) -> Iterator[Callable[[tuple[int, int, int]], Any]]:
        due, items = (-1, -1, -1), iter(())

        def fetch_item(key: tuple[int, int, int]) -> Any:
            """Return an item. An exception ends the generator, so nothing runs twice."""
            nonlocal due, items
            pass_number, run, number = key
            if key != due:  # another pass, or this worker replaces a dead one
                end_pass(items)
                items = self.node.run(PassContext(pass_number, resources, self.branch))
                next(islice(items, number, number), None)
            due = pass_number, run, number + 1
            return next(items, END_OF_PASS)

        with closing(PassResources()) as resources:
            try:
                yield fetch_item
            finally:
                end_pass(items)


_runs = count()


def _key_groups(pass_number: int, rows: int) -> Iterator[Items]:
    """Yield the keys of items, which need no input, in groups that grow from one item."""
    run, first, size = next(_runs), 0, 1
    while True:
        items = np.zeros(size, ITEM)
        items["pass"], items["at"], items["number"] = pass_number, run, range(first, first + size)
        yield items
        first, size = first + size, min(2 * size, rows)


@dataclass(frozen=True)
class InProcess(Step):
    """Runs ``source`` in a worker, at most max(``ahead``, PASS_SLOTS) ahead. See :meth:`.Flow.in_process`."""

    source: Node
    ahead: int

    title = "in_process()"
    facts = ""
    items_never_change = True  # items are copies from the other process

    def run(self, ctx: PassContext) -> Iterator[Any]:
        # one group more than slots: the consumer draws from one while the others are made
        rows = max(1, (self.ahead + 1) // (PASS_SLOTS + 1))
        meter = ctx.meter.groups.setdefault(ctx.key_of(self), EngineMeter(self.label, 1, {}, self.label))
        with (
            ctx.resources.borrow(ctx.key_of(self), partial(self._engine, ctx, rows)) as engine,
            meter.run(engine, _key_groups(ctx.number, rows), ctx.times) as batches,
        ):
            for batch in batches:
                for row in range(len(batch.payloads)):
                    yield take_result(batch, row, self._describe)
                if batch.skipped:
                    return
                del batch

    def _engine(self, ctx: PassContext, rows: int) -> Engine:
        work = MapWork(PassFetch(self.source, ctx.for_source(self).branch).open)
        layout = layout_of(rows, None)
        return Engine(work, layout, workers=1, slots=PASS_SLOTS, describe=self._describe, owner="Flow")

    def _describe(self, item: Any) -> str:
        return f"item {item['number']} of pass {item['pass']}, in_process()"
