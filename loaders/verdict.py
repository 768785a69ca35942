"""What limits a pipeline: one sentence, with the figures that it follows from. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

# A consumer that waits less than this share of the time is what limits: with batches ready, waiting is noise.
HARDLY = 0.1
# Workers that wait for a CPU for this share of the time that they would compute.
CROWDED = 0.25

STEP = "training step"

Place = Literal["worker", "main", "thread"]


@dataclass(frozen=True)
class StageLoad:
    """One stage on the way of an image.

    ``seconds`` of service per image; ``utilisation`` is the share of the time in which its threads or
    processes do that, ``starved`` and ``blocked`` the shares in which they wait for the stage before and the one
    after. ``limit`` is how many images/s it would reach alone (inf where it takes no time).
    """

    name: str
    place: Place
    seconds: float
    utilisation: float
    starved: float
    blocked: float
    limit: float


@dataclass(frozen=True)
class Flowing:
    """What is known of a pipeline over some time: counts, and seconds of who did what.

    ``timed`` of the images came in the time ``elapsed``, the others in a run's first batch, before it.
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

    def loads(self) -> tuple[StageLoad, ...]:
        """The stages in the order in which an image passes them. Empty before a second batch."""
        if not self.timed or self.elapsed <= 0:
            return ()
        overhead = max(0.0, self.filling - sum(self.stages.values()))
        parts = {**self.stages, "transport": overhead}
        step = max(0.0, self.elapsed - self.starved - self.handing)
        return (
            *(self._in_workers(name, seconds) for name, seconds in parts.items()),
            self._in_main("hand-over", self.handing),
            self._in_main(STEP, step),
        )

    def _in_workers(self, name: str, seconds: float) -> StageLoad:
        hands = max(1, self.workers)
        return StageLoad(
            name,
            "worker",
            seconds=seconds / self.images,
            utilisation=min(1.0, seconds / hands / self.elapsed),
            starved=0.0,
            blocked=min(1.0, self.blocked / self.elapsed),
            limit=rate_of(seconds / self.images / hands),
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
        """What limits; None before a second batch."""
        loads = self.loads()
        if not loads:
            return None
        workers = [load for load in loads if load.place == "worker"]
        main = [load for load in loads if load.place == "main"]
        slowest, busiest = max(workers, key=_seconds), max(main, key=_seconds)
        together = rate_of(sum(map(_seconds, workers)) / max(1, self.workers))
        rate = self.timed / self.elapsed
        if self.starved <= HARDLY * self.elapsed:
            advice = _OF_MAIN[busiest.name == STEP]
            return Verdict(busiest.name, rate, slowest.name, max(together, rate), advice)
        alone = rate_of(sum(map(_seconds, main)))
        return Verdict(slowest.name, rate, busiest.name, max(alone, rate), self._of_workers(slowest, rate))

    def of_workers(self) -> Verdict | None:
        """The verdict on the workers alone, whoever waits for whom: how fast they would be without a consumer."""
        workers = [load for load in self.loads() if load.place == "worker"]
        if not workers:
            return None
        slowest, together = (
            max(workers, key=_seconds),
            rate_of(sum(map(_seconds, workers)) / max(1, self.workers)),
        )
        return Verdict(slowest.name, together, STEP, math.inf, self._of_workers(slowest, together))

    def _of_workers(self, slowest: StageLoad, rate: float) -> str:
        if not self.workers:
            return "nothing runs beside the step; set workers to 1 or more"
        asleep = self.filling - self.cpu - self.queued
        if asleep > max(self.cpu, self.queued):
            if slowest.name == "read":
                return (
                    f"the storage delivers {rate * self.image_bytes / 1e6:,.0f} MB/s and the workers wait for it; "
                    "faster storage helps, more workers only where it serves several readers"
                )
            return "the workers wait there rather than compute; more workers help"
        if self.workers <= self.cpus and self.queued > CROWDED * (self.cpu + self.queued):
            return (
                f"the workers wait for a CPU {self.queued / (self.cpu + self.queued):.0%} of the time, for other "
                "processes are at work; more workers do not help"
            )
        enough = self._workers_for_all_cpus()
        if self.workers >= enough:
            return (
                f"all {self.cpus} CPUs are at work, more workers do not help; "
                "more or faster CPUs do, or data machines beside this one"
            )
        return (
            f"more workers help: {enough} instead of {self.workers} would reach "
            f"about {rate * enough / self.workers:,.0f} images/s"
        )

    def _workers_for_all_cpus(self) -> int:
        """More than there are CPUs where a worker keeps one busy for a part of the time only."""
        busy = self.cpu + self.queued
        return max(self.cpus, int(self.cpus * self.filling / busy)) if busy > 0 else self.cpus


OF_STEP = "your step is slower than the data; there is nothing to gain in the loader"
_OF_MAIN = {
    True: OF_STEP,
    False: "the main process is busy handing batches over; make batches larger",
}


@dataclass(frozen=True)
class Verdict:
    """``limit`` is the stage that limits, at ``rate`` images/s; were it not, ``next_limit`` would at ``next_rate``."""

    limit: str
    rate: float
    next_limit: str
    next_rate: float
    advice: str
    unit: str = "images"

    def __str__(self) -> str:
        after = (
            f"; next would be {self.next_limit} at {self.next_rate:,.0f} {self.unit}/s"
            if math.isfinite(self.next_rate)
            else ""
        )
        return f"{self.limit} limits, at {self.rate:,.0f} {self.unit}/s: {self.advice}{after}."

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; ``next_rate`` is null where nothing else would limit. With the sentence."""
        values = asdict(self)
        if not math.isfinite(self.next_rate):
            values["next_rate"] = None
        return {**values, "sentence": str(self)}


def loads_to_list(loads: Sequence[StageLoad]) -> list[dict[str, Any]]:
    """The stages in plain JSON values; a stage that takes no time has no limit."""
    return [{**asdict(load), "limit": load.limit if math.isfinite(load.limit) else None} for load in loads]


def _seconds(load: StageLoad) -> float:
    return load.seconds


def rate_of(seconds: float) -> float:
    """What takes so many seconds each, per second; inf for what takes no time."""
    return 1 / seconds if seconds > 0 else math.inf
