"""A loader's counts and times, and the stage that limits it."""

from __future__ import annotations

import math
import os
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeVar

import numpy as np

from shardprep.formats.runtime.progress import count_of
from shardprep.loaders.batches.passes import ending
from shardprep.loaders.engine.engine import Counts, CoursePoint, EngineStats
from shardprep.loaders.loader.ahead import StorageCounts

MAX_WAITING_SHARE = 0.1  # of the time; a consumer that waits less is the limit, as such waits are noise
MAX_QUEUED_SHARE = 0.25  # of computing time; if workers wait more for a CPU, the CPUs are taken or limited
MAX_CROP_READY = 0.5  # advise crop-ready images only up to this share

STEP = "training step"
HAND_OVER = "hand-over"
STORAGE = "storage"
FAKE = "fake"

Place = Literal["worker", "main", "thread"]
T = TypeVar("T")

OR_PREFETCH = ", or add prefetch() if your step draws them itself"
MAIN_ADVICE = (
    f"it runs in the thread that draws items; do it in a map() with threads= or processes={OR_PREFETCH}"
)
FAKE_ADVICE = f"made-up data takes that long; give fewer seconds{OR_PREFETCH}"


@dataclass(frozen=True)
class StageLoad:
    """The load of one stage of a pipeline.

    Attributes:
        name: The stage's name.
        place: Where it runs: "worker" processes, the "main" process's consuming thread, or a "thread" of an
            input.
        seconds: Its service time per image.
        utilisation: Share of the time that its threads or processes work.
        starved: Share that they wait for the previous stage.
        blocked: Share that they wait for the next stage.
        limit: Its rate alone, in images/s (inf if it takes no time).
    """

    name: str
    place: Place
    seconds: float
    utilisation: float
    starved: float
    blocked: float
    limit: float


@dataclass
class GroupTimes(Counts):
    """The seconds of the stages that share the threads or processes of one step.

    ``stages`` has totals over all ``width`` threads or processes. They waited for items for ``starved``
    seconds, and for the consumer for ``blocked``. For processes only: ``filling``, the seconds with work, and
    its parts on a ``cpu`` and ``queued`` for one. One thread counts; any may :meth:`read`.
    """

    CURRENT: ClassVar = frozenset({"width"})

    name: str
    place: Place
    width: int = 1
    stages: dict[str, float] = field(default_factory=dict)
    starved: float = 0.0
    blocked: float = 0.0
    filling: float = 0.0
    cpu: float = 0.0
    queued: float = 0.0

    @classmethod
    def of_engine(
        cls, stats: EngineStats, name: str, width: int, stages: Mapping[str, str], rest: str, starved: float
    ) -> Self:
        """Return the times of an engine's workers; ``stages`` names its stages, ``rest`` the remainder."""
        filling = sum(stats.filling)
        seconds = {own: stats.stages[stage] for stage, own in stages.items()}
        seconds[rest] = max(0.0, filling - sum(seconds.values()))
        cpu, queued = sum(stats.cpu), sum(stats.queued)
        return cls(name, "worker", width, seconds, starved, stats.blocked, filling, cpu, queued)

    def count(self, stage: str, seconds: float) -> None:
        self.stages[stage] = self.stages.get(stage, 0.0) + seconds

    def track(self, stage: str, call: Callable[..., T]) -> Callable[..., T]:
        """Wrap ``call`` to count its seconds for the stage."""
        return _count_seconds(self.stages, stage, call)

    def track_waits(self, kind: Literal["starved", "blocked"], call: Callable[..., T]) -> Callable[..., T]:
        """Wrap ``call`` to count its seconds as waiting for items or for the consumer."""
        return _count_seconds(vars(self), kind, call)

    def track_draws(self, stage: str, items: Iterator[T]) -> Iterator[T]:
        """Yield the items, counting the seconds of drawing them for the stage."""
        draw = self.track(stage, items.__next__)
        with ending(items), suppress(StopIteration):
            while True:
                yield draw()  # not in a variable, which would hold the batch and its slot

    def restart(self) -> None:
        self.stages.update(dict.fromkeys(self.stages, 0.0))
        self.starved = self.blocked = 0.0

    def read(self) -> Self:
        return replace(self, stages=dict(self.stages))

    def loads(self, rows: float, elapsed: float) -> tuple[StageLoad, ...]:
        """Return the stages' loads over ``elapsed`` seconds in which ``rows`` passed them."""
        waits = {name: min(1.0, getattr(self, name) / elapsed) for name in ("starved", "blocked")}
        return tuple(
            StageLoad(
                name,
                self.place,
                seconds=seconds / rows,
                utilisation=min(1.0, seconds / self.width / elapsed),
                limit=rate_of(seconds / rows / self.width),
                **waits,
            )
            for name, seconds in self.stages.items()
        )

    def advice(
        self,
        slowest: str,
        rate: float,
        *,
        cpus: int,
        unit: str = "images",
        image_bytes: float = 0.0,
        crop_ready: float = 1.0,
    ) -> str:
        """Return advice for when the slowest stage of these processes limits, at this rate."""
        asleep, busy = self.filling - self.cpu - self.queued, self.cpu + self.queued
        if asleep > max(self.cpu, self.queued):
            if slowest == "read":
                return (
                    f"the storage delivers {rate * image_bytes / 1e6:,.0f} MB/s and the workers wait for it; "
                    "faster storage helps, more workers only if it serves several readers"
                )
            return "the workers wait in this stage instead of computing; more workers help"
        if self.width <= cpus and self.queued > MAX_QUEUED_SHARE * busy:
            return (
                f"the workers wait for a CPU {self.queued / busy:.0%} of the time, because other processes use "
                "the CPUs or the container's CPU limit is reached; more workers do not help"
            )
        # if workers compute only part of the time, it takes more of them than CPUs to use all CPUs
        enough = max(cpus, int(cpus * self.filling / busy)) if busy > 0 else cpus
        if self.width >= enough:
            smaller = (
                "; in shards made with prep convert --crop-ready only the training crop of a JPEG is decoded"
            )
            return (
                f"all CPUs ({cpus}) are in use, so more workers do not help; more or faster CPUs would, as "
                f"would data machines{smaller if slowest == 'decode' and crop_ready < MAX_CROP_READY else ''}"
            )
        return (
            f"more workers help: {enough} instead of {self.width} would reach "
            f"about {rate * enough / self.width:,.0f} {unit}/s"
        )


def _count_seconds(counters: dict[str, float], name: str, call: Callable[..., T]) -> Callable[..., T]:
    counters.setdefault(name, 0.0)

    def counted(*arguments: Any) -> T:
        began = time.perf_counter()
        try:
            return call(*arguments)
        finally:
            counters[name] += time.perf_counter() - began

    return counted


@dataclass(frozen=True)
class Verdict:
    """The stage that limits a pipeline; ``str`` gives a sentence.

    Attributes:
        limit: Name of that stage.
        rate: The pipeline's rate, in ``unit`` per second.
        next_limit: Name of the stage that would limit next; empty if unknown.
        next_rate: The rate then; inf if nothing else would limit.
        advice: What helps.
        unit: "images" or "batches".
    """

    limit: str
    rate: float
    next_limit: str
    next_rate: float
    advice: str
    unit: str = "images"

    def __str__(self) -> str:
        after = f"; next would be {self.next_limit} at {self.next_rate:,.0f} {self.unit}/s"
        if not self.next_limit:
            after = "; what would limit next is unknown"
        elif not math.isfinite(self.next_rate):
            after = ""
        return f"{self.limit} limits, at {self.rate:,.0f} {self.unit}/s: {self.advice}{after}."

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values and the sentence; an infinite ``next_rate`` becomes None."""
        next_rate = self.next_rate if math.isfinite(self.next_rate) else None
        return {**asdict(self), "next_rate": next_rate, "sentence": str(self)}


def loads_to_list(loads: Sequence[StageLoad]) -> list[dict[str, Any]]:
    """Return the stages as plain JSON values; an infinite limit becomes None."""
    return [{**asdict(load), "limit": load.limit if math.isfinite(load.limit) else None} for load in loads]


def rate_of(seconds: float) -> float:
    """Return the rate per second of an operation that takes ``seconds``; inf for 0."""
    return 1 / seconds if seconds > 0 else math.inf


def seconds_of(*loads: StageLoad) -> float:
    """Return the seconds per row of these stages of one group."""
    return sum(1 / load.limit for load in loads if math.isfinite(load.limit))


class Supplier(NamedTuple):
    """The stages of one group outside of the consumer's thread, which waited for it.

    ``advice`` returns what helps if the stage of this name limits, at this rate.
    """

    loads: tuple[StageLoad, ...]
    waited: float
    advice: Callable[[str, float], str]


class PipelineStats(Counts, ABC):
    """Shared base of the stats of loaders, flows and inputs, named ``kind``: their stages and their limit."""

    kind: ClassVar[str]
    early_message: ClassVar[str] = "nothing is known before the second batch"
    hand_over_advice: ClassVar[str] = "the main process is busy passing batches on; make batches larger"

    timed: int
    elapsed: float

    @property
    def unit(self) -> str:
        """The unit of rates."""
        return "images"

    @property
    def _timed_rows(self) -> float:
        return self.timed

    @property
    @abstractmethod
    def _main_times(self) -> GroupTimes:
        """The times of the consumer's thread; the last stage is its own work."""

    @abstractmethod
    def suppliers(self) -> list[Supplier]:
        """Return what the consumer's thread draws from, in the order of the data."""

    def as_supplier(self) -> Supplier:
        """Return the consumer's thread without its own work, as another consumer's supplier."""
        own = self._main_times.loads(self._timed_rows, self.elapsed)[:-1]
        return Supplier(own, 0.0, lambda slowest, rate: self._advice_for(slowest))

    def _advice_for(self, stage: str) -> str:
        """Return advice for when a stage of the consumer's thread limits."""
        step_advice = f"your step is slower than the data; a faster {self.kind} would gain nothing"
        advice = {STEP: step_advice, HAND_OVER: self.hand_over_advice, FAKE: FAKE_ADVICE}
        return advice.get(stage, MAIN_ADVICE)

    @property
    def is_known(self) -> bool:
        """Whether enough was counted for loads and a verdict."""
        return self.timed > 0 and self.elapsed > 0

    @property
    def loads(self) -> tuple[StageLoad, ...]:
        """Each stage's service time, utilisation and waiting; the last stage is the consumer's own work.

        Empty before the second batch or item.
        """
        if not self.is_known:
            return ()
        before = (load for supplier in self.suppliers() for load in supplier.loads)
        return (*before, *self._main_times.loads(self._timed_rows, self.elapsed))

    @property
    def verdict(self) -> Verdict | None:
        """The stage that limits; None before the second batch or item."""
        if not self.is_known:
            return None
        *own, step = main = self._main_times.loads(self._timed_rows, self.elapsed)
        rate, suppliers = self._timed_rows / self.elapsed, [each for each in self.suppliers() if each.loads]
        supplier = max(suppliers, key=lambda each: (each.waited, seconds_of(*each.loads)), default=None)
        if supplier and supplier.waited > MAX_WAITING_SHARE * self.elapsed:
            limit = max(supplier.loads, key=seconds_of)
            advice = supplier.advice(limit.name, rate)
            suppliers.remove(supplier)
        else:
            busy = sum(load.utilisation for load in own) > MAX_WAITING_SHARE
            limit = max(own, key=seconds_of) if busy else step
            advice = self._advice_for(limit.name)
        groups = [*(each.loads for each in suppliers), tuple(load for load in main if load is not limit)]
        slowest = max(groups, key=lambda loads: seconds_of(*loads))
        after = max(slowest, key=seconds_of).name if slowest else STEP
        return Verdict(limit.name, rate, after, max(rate_of(seconds_of(*slowest)), rate), advice, self.unit)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values: the counts, ``loads`` and ``verdict``."""
        own: Any = self
        verdict = self.verdict
        return {
            **asdict(own),
            "loads": loads_to_list(self.loads),
            "verdict": verdict.to_dict() if verdict else None,
        }

    def __str__(self) -> str:
        return str(self.verdict or self.early_message)

    def to_html(self, path: str | os.PathLike[str] | None = None, *, name: str | None = None) -> str:
        """Return a page with the stages, the limit, and the course, and write it to ``path`` if given.

        The page is one file without a script. ``name``, by default the kind, goes into its title. Raises
        OSError.
        """
        from shardprep.loaders.loader.run_page import run_page, save_page  # start-up time

        text = run_page(self.to_dict(), name=self.kind if name is None else name)
        if path is not None:
            save_page(text, path)
        return text

    def _repr_html_(self) -> str:
        from shardprep.formats.reports.pages import render  # start-up time
        from shardprep.loaders.loader.run_page import RunValues

        return render("stages", run=RunValues.of(self.to_dict()))


@dataclass(frozen=True, repr=False)
class LoaderStats(EngineStats, PipelineStats):
    """Stats of a loader: the counts and times of its engine, and the conditions.

    Attributes:
        workers: Number of worker processes.
        cpus: Number of CPUs that this process may use.
        image_bytes: Mean size of what is read of a record: its image, and columns of varying size.
        crop_ready: Share of crop-ready images, 0..1.
        course: Rows and queue over time, always since the loader's first batch, in at most 240 parts of equal
            length.
        storage: The downloads of a remote dataset.
    """

    CURRENT: ClassVar = frozenset({"workers", "cpus", "image_bytes", "crop_ready", "course"})
    kind: ClassVar[str] = "loader"

    workers: int
    cpus: int
    image_bytes: float
    crop_ready: float
    course: tuple[CoursePoint, ...] = ()
    storage: StorageCounts = field(default_factory=StorageCounts)

    @property
    def _main_times(self) -> GroupTimes:
        step = max(0.0, self.elapsed - self.starved - self.handing - self.storage.limiting)
        return GroupTimes("main", "main", 1, {HAND_OVER: self.handing, STEP: step}, self.starved)

    def suppliers(self) -> list[Supplier]:
        """Return the downloads, if batches waited for them, and the workers."""
        suppliers, waited = list[Supplier](), self.storage.limiting
        if waited:
            advice = (
                f"batches wait for downloads {waited / self.elapsed:.0%} of the time; a faster link, a larger "
                "cache_limit, or prep fetch before training helps"
            )
            downloads = GroupTimes(STORAGE, "main", 1, {STORAGE: waited}, self.starved)
            loads = downloads.loads(self.timed, self.elapsed)
            suppliers.append(Supplier(loads, waited, lambda slowest, rate: advice))
        stages = {name: name for name in self.stages}
        group = GroupTimes.of_engine(self, "workers", max(1, self.workers), stages, "transport", 0.0)
        loads = group.loads(self.rows, self.elapsed)
        return [*suppliers, Supplier(loads, self.starved, partial(self._advice, group))]

    def _advice(self, group: GroupTimes, slowest: str, rate: float) -> str:
        if not self.workers:
            return "everything runs in the thread that draws batches; set workers to 1 or more"
        conditions = {name: getattr(self, name) for name in ("cpus", "image_bytes", "crop_ready")}
        return group.advice(slowest, rate, **conditions)

    def __repr__(self) -> str:
        limit = f"; {self.verdict.limit} limits" if self.verdict else ""
        return f"<{type(self).__name__}: {count_of(self.rows, 'image')} in {count_of(self.batches, 'batch')}{limit}>"


WINDOW_S = 0.5  # per rate, so that the median ignores short delays


class Arrivals:
    """Arrival times and amounts of ``items``, drawn and dropped; the amounts exclude the first item."""

    def __init__(self, items: Iterator[Any], amount: Callable[[Any], int]) -> None:
        self._items = items
        self._amount_of = amount
        self._times = array("d")
        self._amounts = array("q")

    def draw(self) -> None:
        """Draw one item. Raises StopIteration at the end."""
        self._amounts.append(self._amount_of(next(self._items)))
        self._times.append(time.perf_counter())

    def draw_for(self, seconds: float) -> None:
        """Draw at least one item, and more until ``seconds`` after the first one's arrival."""
        until = self.first + seconds
        while len(self._times) < 2 or self._times[-1] <= until:
            self.draw()

    @property
    def first(self) -> float:
        """Time of the first arrival, by ``time.perf_counter``."""
        return self._times[0]

    @property
    def seconds(self) -> float:
        return self._times[-1] - self._times[0]

    @property
    def count(self) -> int:
        return len(self._times) - 1

    @property
    def amount(self) -> int:
        return sum(self._amounts) - self._amounts[0]

    @property
    def rate(self) -> float:
        """Amount per second: the median over whole windows, each from one arrival to another."""
        width, since, amount, rates = min(WINDOW_S, self.seconds), self.first, 0, []
        for at, count in zip(self._times[1:], self._amounts[1:], strict=True):
            amount += count
            if at - since >= width:
                rates.append(amount / (at - since))
                since, amount = at, 0
        return float(np.median(rates))

    @property
    def gaps(self) -> tuple[float, float]:
        """Seconds between arrivals: the median and the 99th percentile."""
        p50, p99 = np.percentile(np.diff(self._times), (50, 99)).tolist()
        return p50, p99
