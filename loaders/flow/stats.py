"""Counts and times of a flow's passes, their bottleneck, and the measurement of its rate."""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial, reduce
from operator import itemgetter
from time import perf_counter
from typing import Any, ClassVar, Self

import numpy as np

from shardprep.formats.errors import UsageError
from shardprep.formats.runtime.processes import usable_cpus
from shardprep.formats.runtime.progress import check_seconds, count_of, format_number
from shardprep.loaders.batches.passes import end_pass
from shardprep.loaders.batches.stack import row_count
from shardprep.loaders.flow.node import Node, NodeKey, PassMeter, walk
from shardprep.loaders.loader.stats import (
    HAND_OVER,
    OR_PREFETCH,
    STEP,
    Arrivals,
    GroupTimes,
    PipelineStats,
    StageLoad,
    Supplier,
)

POOL_ADVICE = "more threads help where the function waits or releases the GIL, otherwise processes="
THREAD_ADVICE = "the steps before prefetch() share one thread; give map() threads= or processes="
PROCESS_ADVICE = "the steps before in_process() share one process; map() with processes= uses several"

MAIN: NodeKey = (), -1
COUNTS = ("items", "rows", "timed", "elapsed", "warming", "drawing")


@dataclass(frozen=True)
class FlowStats(PipelineStats):
    """Counts and seconds of a flow's passes since it was made, or since other stats of it (:meth:`since`).

    ``items`` were delivered in ``passes`` passes; ``rows`` counts the rows of batches if the flow makes
    batches (``has_rows``), otherwise items. ``timed`` counts the rows after each pass's first item.
    ``elapsed`` is the seconds of all passes, each since its first item; ``drawing`` is the part that the
    consumer's thread spent in the flow, ``warming`` the seconds before first items. ``groups`` has the
    seconds of the stages, by the thread, threads or processes that run them. ``cpus`` is the number of CPUs
    that this process may use. ``steps`` are the names of the steps in the order of the data.
    """

    CURRENT: ClassVar = frozenset({"cpus", "steps"})
    kind: ClassVar[str] = "flow"
    early_message: ClassVar[str] = "nothing is known before the second item of a pass; make batches smaller"
    hand_over_advice: ClassVar[str] = (
        f"the steps between items take the time; make batches larger{OR_PREFETCH}"
    )

    has_rows: bool
    passes: int = 0
    items: int = 0
    rows: int = 0
    timed: int = 0
    elapsed: float = 0.0
    warming: float = 0.0
    drawing: float = 0.0
    groups: dict[NodeKey, GroupTimes] = field(default_factory=dict)
    cpus: int = 0
    steps: tuple[str, ...] = ()

    @classmethod
    def of(cls, meter: PassMeter, *, has_rows: bool) -> Self:
        counts = {name: getattr(meter, name) for name in COUNTS}
        main = meter.main.read() if meter.items else GroupTimes("main", "main")
        groups = {MAIN: main} | {at: group.read() for at, group in list(meter.groups.items())}
        return cls(has_rows, passes=1, groups=groups, **counts)

    @property
    def unit(self) -> str:
        """The unit of rates: "rows" or "items"."""
        return "rows" if self.has_rows else "items"

    @property
    def _main_times(self) -> GroupTimes:
        main = self.groups[MAIN]
        rest = max(0.0, self.drawing - main.starved - sum(main.stages.values()))
        return replace(
            main, stages=main.stages | {HAND_OVER: rest, STEP: max(0.0, self.elapsed - self.drawing)}
        )

    def suppliers(self) -> list[Supplier]:
        waited = self.groups[MAIN].starved
        return [
            Supplier(group.loads(self.rows, self.elapsed), waited, partial(self._advice, group))
            for at, group in self.groups.items()
            if at != MAIN and group.stages
        ]

    def _advice(self, group: GroupTimes, slowest: str, rate: float) -> str:
        if group.place == "thread":
            return POOL_ADVICE if slowest == group.name else THREAD_ADVICE
        if group.name == "in_process()":
            return PROCESS_ADVICE
        return group.advice(slowest, rate, cpus=self.cpus, unit=self.unit)

    @property
    def loads(self) -> tuple[StageLoad, ...]:
        """Each stage's service time, utilisation and waiting, in the order of the data.

        The last stage is the consumer's own work. Empty before the second item.
        """
        known = {name: at for at, name in enumerate((*self.steps, HAND_OVER, STEP))}
        placed, at = list[tuple[int, StageLoad]](), -1
        for load in super().loads:
            at = known.get(load.name, at)  # what is no step, such as transport, stays behind the one before
            placed.append((at, load))
        return tuple(load for _, load in sorted(placed, key=itemgetter(0)))

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values: the counts, ``groups``, ``loads`` and ``verdict``."""
        return super().to_dict() | {"groups": list(map(asdict, self.groups.values()))}

    def __repr__(self) -> str:
        limit = f"; {self.verdict.limit} limits" if self.verdict else ""
        return f"<FlowStats: {self.rows:,} {self.unit} in {count_of(self.passes, 'pass')}{limit}>"


class RunningPass(Iterator[Any]):
    """The ``items`` of a pass, counted by ``meter``; ``has_rows`` counts their rows. Not thread-safe."""

    def __init__(self, items: Iterator[Any], meter: PassMeter, *, has_rows: bool) -> None:
        self._items = items
        self._meter = meter
        self._has_rows = has_rows

    def __next__(self) -> Any:
        began, rows = perf_counter(), None
        try:
            item = next(self._items)
            rows = row_count(item) if self._has_rows else 1
            return item
        except StopIteration:
            self._meter.is_over = True
            raise
        finally:
            self._meter.count_draw(began, rows)

    def close(self) -> None:
        """End the pass. Idempotent."""
        end_pass(self._items)


class FlowMeter:
    """Sums the counters of all passes. One thread at a time begins passes; any thread may read."""

    def __init__(self, node: Node) -> None:
        self._node = node
        # the sum of finished passes, and the others; one tuple, so that a reader sees each pass once
        self._passes = FlowStats(node.makes_batches), list[tuple[weakref.ref[RunningPass], PassMeter]]()

    def count(self, items: Iterator[Any], meter: PassMeter) -> RunningPass:
        total, passes = self._passes
        begun = RunningPass(items, meter, has_rows=total.has_rows)
        running = [each for each in passes if each[0]() is not None]
        over = [each[1] for each in passes if each not in running]
        self._passes = self._sum(total, over), [*running, (weakref.ref(begun), meter)]
        return begun

    def read(self) -> FlowStats:
        total, passes = self._passes
        steps = tuple(each.label for each in walk(self._node))[::-1]
        own = self._sum(total, [meter for _, meter in passes])
        return replace(own, cpus=usable_cpus(), steps=steps)

    def _sum(self, total: FlowStats, meters: list[PassMeter]) -> FlowStats:
        passes = (FlowStats.of(meter, has_rows=total.has_rows) for meter in meters)
        return reduce(FlowStats.plus, passes, total)


@dataclass(frozen=True)
class FlowSpeed:
    """The speed of a flow: ``items`` items in ``seconds`` seconds after the first item, in ``passes`` passes.

    ``items_per_second``, ``rows_per_second`` and ``megabytes_per_second`` are medians over windows of half a
    second or more. A megabyte is a million bytes of arrays and bytes objects in the items, at any depth.
    ``rows`` counts the rows of batches; both row figures are None if the flow makes no batches.
    ``p50_milliseconds`` and ``p99_milliseconds`` are percentiles of the time between two items.
    ``first_item_seconds`` is the time until the first item, with the start of workers.
    ``cpu_seconds_per_item`` is the CPU time of this process with all its threads.
    """

    items: int
    rows: int | None
    passes: int
    seconds: float
    items_per_second: float
    rows_per_second: float | None
    megabytes_per_second: float
    p50_milliseconds: float
    p99_milliseconds: float
    first_item_seconds: float
    cpu_seconds_per_item: float

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        rows = "" if self.rows_per_second is None else f"{self.rows_per_second:,.0f} rows/s, "
        return (
            f"{self.items_per_second:,.1f} items/s, {rows}{self.megabytes_per_second:,.1f} MB/s over "
            f"{self.seconds:,.1f} s and {count_of(self.passes, 'pass')}: "
            f"{format_number(self.p50_milliseconds)} ms from item to item, 1 in 100 over "
            f"{format_number(self.p99_milliseconds)} ms, the first after {format_number(self.first_item_seconds)} s, "
            f"{format_number(self.cpu_seconds_per_item * 1e3)} ms of this process's CPU per item."
        )


def measure(passes: Iterable[Iterable[Any]], *, has_rows: bool, seconds: float) -> FlowSpeed:
    """Draw endless passes, one after the other, for ``seconds`` seconds after the first item.

    At least one item is measured after the first. Raises UsageError for a pass without items.
    """
    seconds = check_seconds(seconds, "the time to measure")
    counts = Counter[str]()

    def draw() -> Generator[Any, None, None]:
        for items in passes:
            before, counts["passes"] = counts["items"], counts["passes"] + 1
            yield from items
            if counts["items"] == before:
                raise UsageError("a pass of this flow has no items, so there is nothing to measure")

    def count(item: Any) -> int:
        counts["items"] += 1
        counts["bytes"] += _count_bytes(item)
        counts["rows"] += row_count(item) if has_rows else 0
        return 1

    began = perf_counter()
    with closing(draw()) as items:
        arrivals = Arrivals(items, count)
        arrivals.draw()
        cpu, counts["bytes"], counts["rows"] = time.process_time(), 0, 0
        arrivals.draw_for(seconds)
        cpu = time.process_time() - cpu
    rate, (p50, p99) = arrivals.rate, arrivals.gaps
    return FlowSpeed(
        items=arrivals.count,
        rows=counts["rows"] if has_rows else None,
        passes=counts["passes"],
        seconds=arrivals.seconds,
        items_per_second=rate,
        rows_per_second=rate * counts["rows"] / arrivals.count if has_rows else None,
        megabytes_per_second=rate * counts["bytes"] / arrivals.count / 1e6,
        p50_milliseconds=p50 * 1e3,
        p99_milliseconds=p99 * 1e3,
        first_item_seconds=arrivals.first - began,
        cpu_seconds_per_item=cpu / arrivals.count,
    )


def _count_bytes(part: Any) -> int:
    if isinstance(part, np.ndarray | np.generic | memoryview):
        return part.nbytes
    if isinstance(part, bytes | bytearray):
        return len(part)
    if isinstance(part, Mapping):
        return sum(map(_count_bytes, part.values()))
    return sum(map(_count_bytes, part)) if isinstance(part, tuple | list) else 0
