"""Counters of a running pass: what it delivered, and the seconds of its stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, Literal, Protocol, TypeVar, cast

from shardprep.loaders.batching.passes import end

NodePlace = tuple[tuple[int, ...], int]
T = TypeVar("T")
SECONDS = ("starved", "blocked", "filling", "cpu", "queued")  # of GroupTimes, besides its stages


@dataclass(frozen=True)
class GroupTimes:
    """The seconds of the stages that share the thread, the threads or the processes of one step.

    ``name`` is the step's, "main" for the consumer's thread. ``place`` is where the stages run, as in
    :class:`.StageLoad`; ``width`` is the number of threads or processes. ``stages`` are the seconds of each
    stage, of all threads or processes together. ``starved`` is how long they waited for items, ``blocked``
    how long for the consumer. ``filling``, ``cpu`` and ``queued`` are for processes only: the seconds with
    work, and the parts of these on a CPU and waiting for one.
    """

    name: str
    place: Literal["worker", "main", "thread"]
    width: int = 1
    stages: dict[str, float] = field(default_factory=dict)
    starved: float = 0.0
    blocked: float = 0.0
    filling: float = 0.0
    cpu: float = 0.0
    queued: float = 0.0

    def plus(self, other: GroupTimes) -> GroupTimes:
        """Return the sum of both, which are of one group."""
        stages = dict.fromkeys((*self.stages, *other.stages), 0.0)
        for name in stages:
            stages[name] = self.stages.get(name, 0.0) + other.stages.get(name, 0.0)
        sums = {name: getattr(self, name) + getattr(other, name) for name in SECONDS}
        return replace(self, stages=stages, **sums)

    def less(self, other: GroupTimes) -> GroupTimes:
        """Return what was counted after ``other``, earlier times of the same group."""
        stages = {name: seconds - other.stages.get(name, 0.0) for name, seconds in self.stages.items()}
        return replace(
            self, stages=stages, **{name: getattr(self, name) - getattr(other, name) for name in SECONDS}
        )


class GroupMeter:
    """Counters of one group. The group's stages are counted in one thread; any thread may read."""

    def __init__(self, name: str, place: Literal["main", "thread"], width: int = 1) -> None:
        self._name, self._place, self._width = name, place, width
        self._stages: dict[str, float] = {}
        self._waits = {"starved": 0.0, "blocked": 0.0}

    def count(self, stage: str, seconds: float) -> None:
        """Add the seconds of a stage that were measured elsewhere."""
        self._stages[stage] = self._stages.get(stage, 0.0) + seconds

    def count_wait(self, seconds: float) -> None:
        """Add seconds of waiting for items that were measured elsewhere."""
        self._waits["starved"] += seconds

    def timed(self, stage: str, call: Callable[..., T]) -> Callable[..., T]:
        """Return ``call``, with its seconds counted for the stage."""
        return _timed(self._stages, stage, call)

    def timed_draws(self, stage: str, items: Iterator[T]) -> Iterator[T]:
        """Return the items, with the seconds of drawing each counted for the stage."""
        return _TimedDraws(self.timed(stage, items.__next__), items)

    def timed_wait(self, call: Callable[..., T]) -> Callable[..., T]:
        """Return ``call``, with its seconds counted as waiting for items."""
        return _timed(self._waits, "starved", call)

    def timed_block(self, call: Callable[..., T]) -> Callable[..., T]:
        """Return ``call``, with its seconds counted as waiting for the consumer."""
        return _timed(self._waits, "blocked", call)

    def restart(self) -> None:
        """Set the counters to 0."""
        for counters in (self._stages, self._waits):
            counters.update(dict.fromkeys(counters, 0.0))

    def read(self) -> GroupTimes:
        return GroupTimes(self._name, self._place, self._width, dict(self._stages), **self._waits)


def _timed(counters: dict[str, float], name: str, call: Callable[..., T]) -> Callable[..., T]:
    counters.setdefault(name, 0.0)

    def counted(*arguments: Any) -> T:
        began = perf_counter()
        try:
            return call(*arguments)
        finally:
            counters[name] += perf_counter() - began

    return counted


class _TimedDraws(Iterator[T]):
    def __init__(self, draw: Callable[[], T], items: Iterator[T]) -> None:
        self._draw = draw
        self._items = items

    def __next__(self) -> T:
        return self._draw()

    def close(self) -> None:
        end(self._items)


class Readable(Protocol):
    """The counters of a group."""

    def read(self) -> GroupTimes: ...


R = TypeVar("R", bound=Readable)


class PassMeter:
    """Counters of one pass, and whether it ``is_over``. One thread draws its items; any thread may read.

    ``rows`` are those of the ``items``; ``timed`` of them were not in the first item. ``elapsed`` are the
    seconds from the first item to the last event, ``drawing`` the part of them within the flow, and
    ``warming`` those before the first item. ``main`` counts from the first item on, ``groups`` from the
    beginning.
    """

    def __init__(self) -> None:
        self.items = self.rows = self.timed = 0
        self.is_over = False
        self.elapsed = self.drawing = self.warming = 0.0
        self.main = GroupMeter("main", "main")
        self.groups: dict[NodePlace, Readable] = {}
        self._first: float | None = None

    def group(self, at: NodePlace, make: Callable[[], R]) -> R:
        """The group of the step at this place, made by ``make`` in its first run."""
        found = self.groups.get(at)
        return cast("R", self.groups.setdefault(at, make()) if found is None else found)

    def drew(self, began: float, rows: int | None) -> None:
        """Count a draw that began then and gave an item of ``rows`` rows; None for no item."""
        now = perf_counter()
        if self._first is not None:
            self.elapsed, self.drawing = now - self._first, self.drawing + now - began
            self.timed += rows or 0
        elif rows is not None:
            self._first, self.warming = now, now - began
            self.main.restart()
        if rows is not None:
            self.items, self.rows = self.items + 1, self.rows + rows
