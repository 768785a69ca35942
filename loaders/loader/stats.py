"""Counts and times of a loader, and the stage that limits it."""

from __future__ import annotations

import math
import os
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

import numpy as np

from shardprep.loaders.engine.engine import CoursePoint, EngineStats
from shardprep.loaders.loader.ahead import StorageCounts

# A consumer that waits for less than this share of the time limits: with batches ready, such waiting is
# noise.
MAX_WAITING_SHARE = 0.1
# If workers wait for a CPU for more than this share of their computing time, other processes use the CPUs.
MAX_QUEUED_SHARE = 0.25
MOST_CROP_READY = 0.5  # above this share of crop-ready images, more of them are not advised

STEP = "training step"
STORAGE = "storage"

Place = Literal["worker", "main", "thread"]

OR_PREFETCH = ", or add prefetch() if your step draws them itself"  # an input's thread draws for it
STEP_ADVICE = "your step is slower than the data; a faster loader would gain nothing"
_MAIN_ADVICE = {
    True: STEP_ADVICE,
    False: "the main process is busy passing batches on; make batches larger",
}


@dataclass(frozen=True)
class StageLoad:
    """The load of one stage of a pipeline.

    Attributes:
        name: The stage's name.
        place: Where it runs: "worker" processes, the "main" process's consuming thread, or a "thread" of an
            input.
        seconds: Its service time per image.
        utilisation: Share of the time that its threads or processes work.
        starved: Share that they wait for the stage before.
        blocked: Share that they wait for the stage after.
        limit: Its rate alone, in images/s (inf if it takes no time).
    """

    name: str
    place: Place
    seconds: float
    utilisation: float
    starved: float
    blocked: float
    limit: float


@dataclass(frozen=True)
class PipelineTimes:
    """Counts and times of a pipeline over an interval, in seconds.

    ``timed`` of the images came in the time ``elapsed``; the others were in the first batch, before it.
    ``unit`` is the word for images. ``crop_ready`` is the share of the images that are crop-ready, None where
    that is unknown. ``storage`` is how long no batch could be begun because its shards were not downloaded.
    ``alone`` is the advice without workers.
    """

    images: int
    timed: int
    elapsed: float
    image_bytes: float
    workers: int
    cpus: int
    filling: float
    cpu: float
    queued: float
    stages: dict[str, float]
    blocked: float
    starved: float
    handing: float
    unit: str = "images"
    crop_ready: float | None = None
    storage: float = 0.0
    alone: str = "everything runs in the thread that draws batches; set workers to 1 or more"

    def loads(self) -> tuple[StageLoad, ...]:
        """Return the stages in an image's order. Empty before a second batch."""
        if not self.timed or self.elapsed <= 0:
            return ()
        overhead = max(0.0, self.filling - sum(self.stages.values()))
        parts = {**self.stages, "transport": overhead}
        step = max(0.0, self.elapsed - self.starved - self.handing - self.storage)
        return (
            *((self._in_main(STORAGE, self.storage),) if self.storage else ()),
            *(self._in_workers(name, seconds) for name, seconds in parts.items()),
            self._in_main("hand-over", self.handing),
            self._in_main(STEP, step),
        )

    def _in_workers(self, name: str, seconds: float) -> StageLoad:
        workers = max(1, self.workers)
        return StageLoad(
            name,
            "worker",
            seconds=seconds / self.images,
            utilisation=min(1.0, seconds / workers / self.elapsed),
            starved=0.0,
            blocked=min(1.0, self.blocked / self.elapsed),
            limit=rate_of(seconds / self.images / workers),
        )

    def _in_main(self, name: str, seconds: float) -> StageLoad:
        return StageLoad(
            name,
            "main",
            seconds=seconds / self.timed,
            utilisation=min(1.0, seconds / self.elapsed),
            starved=min(1.0, self.starved / self.elapsed),
            blocked=0.0,
            limit=rate_of(seconds / self.timed),
        )

    def verdict(self) -> Verdict | None:
        """Return the stage that limits; None before a second batch."""
        loads = self.loads()
        if not loads:
            return None
        workers = [load for load in loads if load.place == "worker"]
        main = [load for load in loads if load.place == "main" and load.name != STORAGE]
        slowest, busiest = max(workers, key=_seconds), max(main, key=_seconds)
        together = rate_of(sum(map(_seconds, workers)) / max(1, self.workers))
        rate = self.timed / self.elapsed
        if self.storage > max(self.starved, MAX_WAITING_SHARE * self.elapsed):
            after = slowest if together * sum(map(_seconds, main)) < 1 else busiest
            least = min(together, rate_of(sum(map(_seconds, main))))
            return Verdict(STORAGE, rate, after.name, max(least, rate), self._of_storage())
        if self.starved <= MAX_WAITING_SHARE * self.elapsed:
            advice = _MAIN_ADVICE[busiest.name == STEP]
            return Verdict(busiest.name, rate, slowest.name, max(together, rate), advice)
        alone = rate_of(sum(map(_seconds, main)))
        return Verdict(slowest.name, rate, busiest.name, max(alone, rate), self.advice(slowest, rate))

    def of_workers(self) -> Verdict | None:
        """Return the verdict on the workers alone, at the rate that they would reach without a consumer."""
        workers = [load for load in self.loads() if load.place == "worker"]
        if not workers:
            return None
        slowest, together = (
            max(workers, key=_seconds),
            rate_of(sum(map(_seconds, workers)) / max(1, self.workers)),
        )
        return Verdict(slowest.name, together, STEP, math.inf, self.advice(slowest, together))

    def _of_storage(self) -> str:
        return (
            f"batches wait for downloads {self.storage / self.elapsed:.0%} of the time; a faster link, a larger "
            "cache_limit, or prep fetch before training helps"
        )

    def advice(self, slowest: StageLoad, rate: float) -> str:
        """Return what helps where this stage of the workers limits, at that rate."""
        if not self.workers:
            return self.alone
        asleep = self.filling - self.cpu - self.queued
        if asleep > max(self.cpu, self.queued):
            if slowest.name == "read":
                return (
                    f"the storage delivers {rate * self.image_bytes / 1e6:,.0f} MB/s and the workers wait for it; "
                    "faster storage helps, more workers only if it serves several readers"
                )
            return "the workers wait in this stage instead of computing; more workers help"
        if self.workers <= self.cpus and self.queued > MAX_QUEUED_SHARE * (self.cpu + self.queued):
            return (
                f"the workers wait for a CPU {self.queued / (self.cpu + self.queued):.0%} of the time, because other "
                "processes use the CPUs; more workers do not help"
            )
        enough = self._workers_for_all_cpus()
        if self.workers >= enough:
            return (
                f"all {self.cpus} CPUs are in use, so more workers do not help; more or faster CPUs would, as "
                f"would data machines{self._smaller_part(slowest)}"
            )
        return (
            f"more workers help: {enough} instead of {self.workers} would reach "
            f"about {rate * enough / self.workers:,.0f} {self.unit}/s"
        )

    def _smaller_part(self, slowest: StageLoad) -> str:
        """Say what lessens the work of decoding, where it can be."""
        if slowest.name != "decode" or self.crop_ready is None or self.crop_ready >= MOST_CROP_READY:
            return ""
        return "; in shards made with prep convert --crop-ready only the training crop of a JPEG is decoded"

    def _workers_for_all_cpus(self) -> int:
        """Number of workers that use all CPUs; more than CPUs if a worker computes only part of the time."""
        busy = self.cpu + self.queued
        return max(self.cpus, int(self.cpus * self.filling / busy)) if busy > 0 else self.cpus


@dataclass(frozen=True)
class Verdict:
    """The stage that limits a pipeline, as a sentence by ``str``.

    Attributes:
        limit: Name of that stage.
        rate: The pipeline's rate, in ``unit`` per second.
        next_limit: Name of the stage that would limit without it; empty where that is unknown.
        next_rate: The rate then, inf where nothing else would limit.
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
        return f"{self.limit} limits, at {self.rate:,.0f} {self.unit}/s: {self.advice}{self._after()}."

    def _after(self) -> str:
        if not self.next_limit:
            return "; what would limit next is unknown"
        if not math.isfinite(self.next_rate):
            return ""
        return f"; next would be {self.next_limit} at {self.next_rate:,.0f} {self.unit}/s"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values and the sentence; a ``next_rate`` that is inf is None."""
        values = asdict(self)
        if not math.isfinite(self.next_rate):
            values["next_rate"] = None
        return {**values, "sentence": str(self)}


def loads_to_list(loads: Sequence[StageLoad]) -> list[dict[str, Any]]:
    """Return the stages as plain JSON values; the limit of a stage that takes no time is None."""
    return [{**asdict(load), "limit": load.limit if math.isfinite(load.limit) else None} for load in loads]


def _seconds(load: StageLoad) -> float:
    return load.seconds


def rate_of(seconds: float) -> float:
    """The rate per second of an operation that takes ``seconds``; inf for 0."""
    return 1 / seconds if seconds > 0 else math.inf


class ShownStats(ABC):
    """Stats of a loader or another input of a training, with their JSON values. ``kind`` names it."""

    kind: ClassVar[str]

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""

    def to_html(self, path: str | os.PathLike[str] | None = None, *, name: str | None = None) -> str:
        """Return a page that shows the stages, what limits, and the course; also write it to ``path``.

        The page is one file without a script. ``name`` is in its title, by default the kind.
        Raises OSError.
        """
        from shardprep.loaders.loader.run_page import run_page, save_page  # start-up time

        text = run_page(self.to_dict(), name=self.kind if name is None else name)
        if path is not None:
            save_page(text, path)
        return text

    def _repr_html_(self) -> str:
        from shardprep.loaders.loader.run_page import load_chart  # start-up time

        return load_chart(self.to_dict())


@dataclass(frozen=True, repr=False)
class LoaderStats(EngineStats, ShownStats):
    """Stats of a loader: those of its engine, and the conditions.

    Attributes:
        workers: Number of worker processes.
        cpus: Number of CPUs that this process may use.
        image_bytes: Mean size of an encoded image.
        crop_ready: Share of the images that are crop-ready, 0..1.
        course: Rows and queue over time, in at most 240 parts of equal length since the loader's first batch;
            also in the stats of a part of the time.
        storage: The downloads of a remote dataset.
    """

    kind: ClassVar[str] = "loader"

    workers: int
    cpus: int
    image_bytes: float
    crop_ready: float
    course: tuple[CoursePoint, ...] = ()
    storage: StorageCounts = field(default_factory=StorageCounts)

    def since(self, before: Self) -> Self:
        """Return the counts since ``before``, earlier stats of the same loader."""
        return replace(super().since(before), storage=self.storage.since(before.storage))

    @property
    def loads(self) -> tuple[StageLoad, ...]:
        """Each stage's service time, utilisation and waiting; the last stage is the consumer's own work."""
        return self._flowing().loads()

    @property
    def verdict(self) -> Verdict | None:
        """The stage that limits; None before the second batch."""
        return self._flowing().verdict()

    def of_workers(self) -> Verdict | None:
        """Return what limits the workers, also where the consumer is slower."""
        return self._flowing().of_workers()

    def _flowing(self) -> PipelineTimes:
        return PipelineTimes(
            images=self.rows,
            filling=sum(self.filling),
            cpu=sum(self.cpu),
            queued=sum(self.queued),
            storage=self.storage.limiting,
            **{name: getattr(self, name) for name in SAME},
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values: the counts, ``loads`` and ``verdict``."""
        verdict = self.verdict
        return {
            **asdict(self),
            "loads": loads_to_list(self.loads),
            "verdict": verdict.to_dict() if verdict else None,
        }

    def __repr__(self) -> str:
        limit = f"; {self.verdict.limit} limits" if self.verdict else ""
        return f"<{type(self).__name__}: {self.rows:,} images in {self.batches:,} batches{limit}>"

    def __str__(self) -> str:
        return str(self.verdict or "nothing is known before the second batch")


SAME = (
    *("timed", "elapsed", "image_bytes", "crop_ready", "workers", "cpus"),
    *("stages", "blocked", "starved", "handing"),
)  # in the stats and the times

WINDOW_S = 0.5  # of one rate, so that the median ignores short delays

Arrival = tuple[float, int]
"""A time, and the amount that came then."""


class Arrivals:
    """Arrival times and amounts of ``items``, which are drawn and dropped at once.

    ``amount`` returns an item's amount. All figures are of the items after the first, from its arrival on. 16
    bytes are kept per item.
    """

    def __init__(self, items: Iterator[Any], amount: Callable[[Any], int]) -> None:
        self._items = items
        self._amount_of = amount
        self._times = array("d")
        self._amounts = array("q")

    def draw(self) -> None:
        """Draw one item. Raises StopIteration where there is none."""
        self._amounts.append(self._amount_of(next(self._items)))
        self._times.append(time.perf_counter())

    def draw_for(self, seconds: float) -> None:
        """Draw items until ``seconds`` after the first one's arrival; at least one."""
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
        """Amount per second: the median over windows."""
        arrivals = zip(self._times, self._amounts, strict=True)
        return float(np.median(window_rates(arrivals, min(WINDOW_S, self.seconds))))

    @property
    def gaps(self) -> tuple[float, float]:
        """Seconds between two arrivals: the median and the 99th percentile."""
        p50, p99 = np.percentile(np.diff(self._times), (50, 99)).tolist()
        return p50, p99


def window_rates(arrivals: Iterable[Arrival], width: float) -> list[float]:
    """Amount per second in windows of at least ``width`` seconds, each from one arrival to another.

    A shorter rest at the end is not counted.
    """
    later = iter(arrivals)
    rates, (since, _), amount = [], next(later), 0
    for at, count in later:
        amount += count
        if at - since >= width:
            rates.append(amount / (at - since))
            since, amount = at, 0
    return rates
