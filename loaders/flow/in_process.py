"""Everything up to here in one other process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import count
from types import UnionType
from typing import Any

import numpy as np

from ...formats.errors import UsageError
from ..batches import Batch
from ..engine import Engine
from ..slots import SlotLayout
from ..work import Items
from .cache import Cache
from .node import Node, Step
from .pass_work import ITEM, PassWork
from .process_map import ProcessMap, room_of
from .results import restored
from .running import Pass
from .whole import whole

SLOTS = 4

_runs = count()


@dataclass(frozen=True)
class InProcess(Step):
    """Runs ``source`` in a worker, at most ``ahead`` items ahead, or ``SLOTS``. See :meth:`.Flow.in_process`."""

    source: Node
    ahead: int

    def __post_init__(self) -> None:
        whole(self.ahead, "the items that in_process runs ahead", least=1)
        if _has(self.source, ProcessMap | InProcess):
            raise UsageError("a step with processes cannot run in another process; leave out in_process()")
        if _has(self.source, Cache):  # which would end with that process, in the middle of a pass
            raise UsageError("a cache() cannot be kept in another process; put it behind in_process()")

    @property
    def never_change(self) -> bool:
        return True  # what arrives here was copied from the other process

    def run(self, now: Pass) -> Iterator[Any]:
        with (
            now.kept.borrowed(now.place(self), partial(self._engine, now)) as engine,
            closing(engine.run(self._plans(now.number))) as batches,  # type: ignore[type-var]
        ):
            for batch in batches:
                yield from self._items_of(batch)
                if batch.skipped:
                    return
                del batch

    def _items_of(self, batch: Batch) -> Iterator[Any]:
        """All that the pass had, of those that were asked for."""
        for item in batch.items[: len(batch.payloads)]:
            yield restored(batch.payloads.pop(next(iter(batch.payloads))), partial(self._described, item))

    def _plans(self, pass_number: int) -> Iterator[Items]:
        """Items to ask for, first one alone, then more together."""
        run, first, rows = next(_runs), 0, 1
        while True:
            plan = np.empty(rows, ITEM)
            plan["pass"], plan["run"], plan["number"] = pass_number, run, range(first, first + rows)
            yield plan
            first, rows = first + rows, min(2 * rows, self._rows)

    @property
    def _rows(self) -> int:
        # one group more, for the rest of it is still to be taken while others come
        return max(1, (self.ahead + 1) // (SLOTS + 1))

    def _engine(self, now: Pass) -> Engine:
        work = PassWork(self.source, now.of(self).branch)
        layout = SlotLayout(self._rows, (), spare=room_of(self._rows), sparse=True)
        return Engine(work, layout, workers=1, slots=SLOTS, describe=self._described)

    def _described(self, item: Any) -> str:
        return f"item {item['number']} of pass {item['pass']}, in_process()"


def _has(node: Node, kind: type[Node] | UnionType) -> bool:
    return isinstance(node, kind) or any(_has(source, kind) for source in node.sources)
