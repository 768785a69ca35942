"""Steps that run their source ahead of the consumer: in a thread, or in one other process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from queue import SimpleQueue
from types import UnionType
from typing import Any

import numpy as np

from shardprep.formats.errors import UsageError
from shardprep.formats.runtime.owned import Owned
from shardprep.formats.runtime.processes import keep_freed_memory, use_one_thread
from shardprep.formats.shards.container import Room
from shardprep.loaders.batches.passes import end, ending
from shardprep.loaders.batches.slots import Arrays, SlotLayout
from shardprep.loaders.engine.engine import Engine
from shardprep.loaders.engine.messages import Clock, EngineBatch, Fill, Items, SkippedRow
from shardprep.loaders.flow.node import InPlace, Node, Step
from shardprep.loaders.flow.passes import GroupMeter, PassContext, PassResources
from shardprep.loaders.flow.process_map import (
    EngineMeter,
    ProcessMap,
    outcome_of,
    raised,
    restored,
    result_bytes,
)
from shardprep.loaders.flow.steps import Cache
from shardprep.loaders.flow.thread_map import Threads


@dataclass(frozen=True)
class Prefetch(InPlace):
    """Runs the source in a thread, at most ``items`` items ahead. See :meth:`.Flow.prefetch`.

    The thread ends with the pass: when the pass is exhausted, closed or dropped, or when the interpreter
    exits. A source that does not return within 5 seconds is not waited for. An exception is raised after the
    items before it.
    """

    source: Node
    items: int

    title = "prefetch({0.items})"
    facts = ""

    def results(self, now: PassContext, numbers: Iterable[int] | None = None) -> Iterator[Any]:
        own = now.meter.group(now.place(self), partial(GroupMeter, self.label, "thread"))
        there = now.of(self, group=own)
        begin = partial(self.source.run, there)
        if numbers is not None:
            begin = partial(self.source.pick, there, numbers)
        drawing = _Drawer(begin, self.items, own)
        with closing(Threads(1, "prefetch", drawing.run, drawing.leave)) as thread:
            wait = now.here.waiting("starved", thread.next_of)
            while found := wait(drawing.found):
                drawing.tokens.put(True)
                yield found.pop()
            if drawing.failed:
                raise drawing.failed.pop()


class _Drawer:
    """The thread's work: draw an item for each of ``tokens``, and put it in a list into ``found``.

    The consumer empties the lists, so that no other reference to an item is left. An empty list is the end.
    """

    def __init__(self, begin: Callable[[], Iterator[Any]], items: int, meter: GroupMeter) -> None:
        self.tokens: SimpleQueue[bool] = SimpleQueue()
        self.found: SimpleQueue[list[Any]] = SimpleQueue()
        self._is_left = False
        self._begin = begin
        self._meter = meter
        self.failed: list[BaseException] = []
        for _ in range(items):
            self.tokens.put(True)

    def run(self) -> None:
        wait = self._meter.waiting("blocked", self.tokens.get)
        try:
            with ending(self._begin()) as items:
                while wait() and not self._is_left and (found := list(islice(items, 1))):
                    self.found.put(found)
        except BaseException as error:  # raised in the consumer
            self.failed.append(error)
        self.found.put([])

    def leave(self) -> None:
        """Make the thread return after the item that it draws."""
        self._is_left = True
        self.tokens.put(False)


ITEM = np.dtype([("pass", "<u8"), ("run", "<u8"), ("number", "<u8")])

ENDED = SkippedRow("the pass has no more items")

SLOTS = 4


@dataclass(frozen=True)
class PassWork:
    """The task of the worker: runs passes of ``node``, which is at ``branch`` in its flow. Picklable."""

    node: Node
    branch: tuple[int, ...]

    item_dtype = ITEM
    stages = ("pass",)

    @contextmanager
    def open(self, clock: Clock) -> Iterator[Fill]:
        use_one_thread()
        keep_freed_memory()
        with closing(PassResources()) as kept, closing(_Runner(self, kept)) as runner:
            yield runner.fill


class _Runner(Owned):
    """The running pass: the items of ``_asked``, a pass number and a run of it, from item ``_due`` on."""

    def __init__(self, work: PassWork, kept: PassResources) -> None:
        self._work = work
        self._kept = kept
        self._items: Iterator[Any] = iter(())
        self._asked = (-1, -1)
        self._due = 0

    def fill(self, items: Items, arrays: Arrays, room: Room | None) -> Iterator[object]:
        for pass_number, run, number in items.tolist():
            self._move_to((pass_number, run), number)
            self._due += 1
            yield self._next()

    def _move_to(self, asked: tuple[int, int], number: int) -> None:
        """Begin another pass if needed, also where this worker replaces one that died."""
        if asked == self._asked and number == self._due:
            return
        self.close()
        now = PassContext(asked[0], self._kept, self._work.branch)
        self._items, self._asked, self._due = self._work.node.run(now), asked, number
        next(islice(self._items, number, number), None)

    def _next(self) -> object:
        """The outcome of the next item. A generator ends with its first exception, so nothing runs twice."""
        try:
            for item in self._items:
                return outcome_of(item)
        except BaseException as error:  # SystemExit, too, is raised at this item
            return raised(error)
        return ENDED

    def close(self) -> None:
        end(self._items)


_runs = count()


@dataclass(frozen=True)
class InProcess(Step):
    """Runs ``source`` in a worker, at most max(``ahead``, SLOTS) ahead. See :meth:`.Flow.in_process`."""

    source: Node
    ahead: int

    title = "in_process()"
    facts = ""
    never_change = True  # items are copies from the other process

    def __post_init__(self) -> None:
        if has(self.source, ProcessMap | InProcess):
            raise UsageError("a step with processes cannot run in another process; leave out in_process()")
        if has(self.source, Cache):  # it would be lost with the process, in the middle of a pass
            raise UsageError("a cache() cannot be kept in another process; put it behind in_process()")

    def run(self, now: PassContext) -> Iterator[Any]:
        meter = partial(EngineMeter, self.label, 1, stages={}, rest=self.label, consumer=now.here)
        with (
            now.kept.borrowed(now.place(self), partial(self._engine, now)) as engine,
            now.meter.group(now.place(self), meter).run(engine, self._plans(now.number)) as batches,
        ):
            for batch in batches:
                yield from self._items_of(batch)
                if batch.skipped:
                    return
                del batch

    def _items_of(self, batch: EngineBatch) -> Iterator[Any]:
        """Yield the requested items that the pass has."""
        for item in batch.items[: len(batch.payloads)]:
            yield restored(batch.payloads.pop(next(iter(batch.payloads))), partial(self._described, item))

    def _plans(self, pass_number: int) -> Iterator[Items]:
        """Yield the items to request: first one, then growing groups."""
        run, first, rows = next(_runs), 0, 1
        while True:
            plan = np.empty(rows, ITEM)
            plan["pass"], plan["run"], plan["number"] = pass_number, run, range(first, first + rows)
            yield plan
            first, rows = first + rows, min(2 * rows, self._rows)

    @property
    def _rows(self) -> int:
        # one group more than slots: the consumer still draws from one while the others are made
        return max(1, (self.ahead + 1) // (SLOTS + 1))

    def _engine(self, now: PassContext) -> Engine:
        work = PassWork(self.source, now.of(self).branch)
        layout = SlotLayout(self._rows, (), spare=result_bytes(self._rows), sparse=True)
        return Engine(work, layout, workers=1, slots=SLOTS, describe=self._described, owner="Flow")

    def _described(self, item: Any) -> str:
        return f"item {item['number']} of pass {item['pass']}, in_process()"


def has(node: Node, kind: type[Node] | UnionType) -> bool:
    """Whether the node, or one that it draws from, is of this kind."""
    return isinstance(node, kind) or any(has(source, kind) for source in node.sources)
