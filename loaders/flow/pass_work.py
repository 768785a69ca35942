"""What the worker of an ``in_process`` step does: run a pass, and hand out its items in order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from ...formats.shard import Room
from ..passes import end
from ..slots import Arrays
from ..work import Clock, Fill, Items, Skipped
from .map_work import use_one_thread
from .node import Node
from .results import outcome_of, raised
from .running import Kept, Pass

ITEM = np.dtype([("pass", "<u8"), ("run", "<u8"), ("number", "<u8")])
ENDED = Skipped("the pass has no more items")


@dataclass(frozen=True)
class PassWork:
    """Runs passes of ``node``, whose place in its flow is ``branch``. Picklable if the node is."""

    node: Node
    branch: tuple[int, ...]

    @property
    def item_dtype(self) -> np.dtype[Any]:
        return ITEM

    @property
    def stages(self) -> tuple[str, ...]:
        return ("pass",)

    @contextmanager
    def open(self, clock: Clock) -> Iterator[Fill]:
        use_one_thread()
        with closing(Kept()) as kept, closing(_Runner(self, kept)) as runner:
            yield runner.fill


class _Runner:
    """The pass under way: the items of ``_asked``, a pass and a run of it, from number ``_due`` on."""

    def __init__(self, work: PassWork, kept: Kept) -> None:
        self._work = work
        self._kept = kept
        self._items: Iterator[Any] = iter(())
        self._asked = (-1, -1)
        self._due = 0

    def fill(self, items: Items, arrays: Arrays, room: Room) -> Iterator[object]:
        for pass_number, run, number in items.tolist():
            self._turn_to((pass_number, run), number)
            self._due += 1
            yield self._next()

    def _turn_to(self, asked: tuple[int, int], number: int) -> None:
        """Begin another pass, also where this worker has taken over from one that died."""
        if asked == self._asked and number == self._due:
            return
        self.close()
        now = Pass(asked[0], self._kept, self._work.branch)
        self._items, self._asked, self._due = self._work.node.run(now), asked, number
        next(islice(self._items, number, number), None)

    def _next(self) -> object:
        """After an exception a generator has no more items, so that nothing runs again for items behind it."""
        try:
            for item in self._items:
                return outcome_of(item)
        except BaseException as error:  # also an exit, which is this item's
            return raised(error)
        return ENDED

    def close(self) -> None:
        end(self._items)
