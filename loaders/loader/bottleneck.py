"""The stage that limits a pipeline, with the measured times that show it. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

# A consumer that waits for less than this share of the time limits: with batches ready, such waiting is
# noise.
MAX_WAITING_SHARE = 0.1
# If workers wait for a CPU for more than this share of their computing time, other processes use the CPUs.
MAX_QUEUED_SHARE = 0.25
MOST_CROP_READY = 0.5  # above this share of crop-ready images, more of them are not advised

STEP = "training step"
STORAGE = "storage"

Place = Literal["worker", "main", "thread"]


STEP_ADVICE = "your step is slower than the data; there is nothing to gain in the loader"
_MAIN_ADVICE = {
    True: STEP_ADVICE,
    False: "the main process is busy handing batches over; make batches larger",
}


@dataclass(frozen=True)
class StageLoad:
    """The load of one stage of a pipeline.

    ``name`` is the stage's; ``place`` is where it runs: "worker" processes, the "main" process's consuming
    thread, or a "thread" of an input. ``seconds`` is its service time per image. ``utilisation`` is the share
    of the time in which its threads or processes work; ``starved`` and ``blocked`` are the shares in which
    they wait for the stage before and the stage after. ``limit`` is its rate alone, in images/s (inf if it
    takes no time).
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

    def loads(self) -> tuple[StageLoad, ...]:
        """Return the stages in the order in which an image passes them. Empty before a second batch."""
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
            return "nothing runs beside the step; set workers to 1 or more"
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
                f"all {self.cpus} CPUs are in use, more workers do not help; "
                f"more or faster CPUs do, or senders on other machines{self._smaller_part(slowest)}"
            )
        return (
            f"more workers help: {enough} instead of {self.workers} would reach "
            f"about {rate * enough / self.workers:,.0f} {self.unit}/s"
        )

    def _smaller_part(self, slowest: StageLoad) -> str:
        """Say what lessens the work of decoding, where it can be."""
        if slowest.name != "decode" or self.crop_ready is None or self.crop_ready >= MOST_CROP_READY:
            return ""
        return "; of JPEGs in shards made with prep convert --crop-ready only a training crop is decoded"

    def _workers_for_all_cpus(self) -> int:
        """Number of workers that use all CPUs; more than CPUs if a worker computes only part of the time."""
        busy = self.cpu + self.queued
        return max(self.cpus, int(self.cpus * self.filling / busy)) if busy > 0 else self.cpus


@dataclass(frozen=True)
class Verdict:
    """The stage that limits a pipeline, as a sentence by ``str``.

    ``limit`` is the name of that stage, ``rate`` the pipeline's rate in ``unit`` per second ("images" or
    "batches"). Without that limit, ``next_limit`` would limit at ``next_rate``, inf where nothing else would;
    where that is unknown, ``next_limit`` is empty. ``advice`` says what helps.
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
