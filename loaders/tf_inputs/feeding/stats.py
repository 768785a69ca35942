"""The occupancy of a queue, and the waiting times on both sides of it."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

from shardprep.loaders.loader.bottleneck import (
    MAX_WAITING_SHARE,
    STEP,
    STEP_ADVICE,
    StageLoad,
    Verdict,
    loads_to_list,
    rate_of,
)
from shardprep.loaders.loader.stats import LoaderStats

STARVED_SHARE = 0.5  # share of batches put into an empty queue, above which a graph's steps count as starved


STAGES = {"StagingInput": "staging"}


QUEUE = "TensorFlow queue"


def stage_of(stats: InputStats) -> str:
    """The name of an input as a stage."""
    return STAGES.get(stats.name, QUEUE)


def load_of(stats: InputStats) -> StageLoad | None:
    """The load of the input's thread, per batch: its work, its waits for the source, its waits for room."""
    if not stats.batches or stats.elapsed <= 0:
        return None
    seconds = stats.converting / max(1, stats.fed)
    return StageLoad(
        stage_of(stats),
        "thread",
        seconds=seconds,
        utilisation=min(1.0, stats.converting / stats.elapsed),
        starved=min(1.0, stats.fetching / stats.elapsed),
        blocked=min(1.0, stats.blocked_seconds / stats.elapsed),
        limit=rate_of(seconds),
    )


def verdict_of(stats: InputStats) -> Verdict | None:
    """The verdict on everything up to the step that draws from this input."""
    if stats.batches < 2 or stats.elapsed <= 0:
        return None
    images = _rows(stats)
    rate = stats.batches * (images or 1) / stats.elapsed
    unit = "images" if images else "batches"
    name, next_rate, advice = _limit_of(stats, images or 1.0)
    if not _starved(stats):
        return Verdict(STEP, rate, name, max(rate, next_rate), STEP_ADVICE, unit)
    step = stats.elapsed - stats.waited
    alone = rate_of(step / stats.batches / (images or 1)) if step > 0 and not stats.unseen else rate
    return Verdict(name, rate, STEP, max(rate, alone), advice, unit)


def _starved(stats: InputStats) -> bool:
    if stats.unseen:
        return stats.starved > STARVED_SHARE
    return stats.waited > MAX_WAITING_SHARE * stats.elapsed


def _limit_of(stats: InputStats, images: float) -> tuple[str, float, str]:
    """Return what limits the rate up to this input, its own thread included: stage, rate, advice."""
    working = rate_of(stats.converting / max(1, stats.fed) / images)
    if stats.fetching <= stats.converting:
        return stage_of(stats), working, "its thread is busy copying; give it arrays that start on 64 bytes"
    if stats.source is not None:
        return _limit_of(stats.source, images)
    if stats.loader is not None and (found := stats.loader.of_workers()) is not None:
        return found.limit, found.rate, found.advice
    fetched = rate_of(stats.fetching / max(1, stats.fed) / images)
    return "source", fetched, "the source is slow; a Loader works in several processes"


def _rows(stats: InputStats) -> float:
    """The mean number of images per batch; 0 where there is no Loader."""
    inner: InputStats | None = stats
    while inner is not None:
        if inner.loader is not None and inner.loader.batches:
            return inner.loader.rows / inner.loader.batches
        inner = inner.source
    return 0.0


@dataclass(frozen=True)
class InputStats:
    """Counts and times of an input since it was made. All times are seconds.

    ``name`` is the input's class. ``capacity`` is how many batches it holds at most; 0 for an input that
    holds none. ``level`` is how many it holds now, ``mean_level`` the mean number whenever another batch was
    put. ``fed`` batches were put in, ``batches`` were taken out, ``epochs`` were ended. ``starved`` is the
    share of steps that found it empty, ``blocked`` the share of batches that found it full;
    ``starved_seconds`` and ``blocked_seconds`` are how long these waited. ``elapsed`` is the time within
    epochs, each from its first batch on; ``waited`` is the part of it in which steps waited. The input's
    thread waited ``fetching`` for the source, and worked ``converting`` on batches. ``source`` has the stats
    of the input that feeds it, ``loader`` those of the Loader; None where there is none.

    ``unseen`` says that a graph dequeues. Its waits cannot be measured: then ``starved`` is the share of
    batches that were put into an empty queue, and the times of steps are 0.
    """

    name: str
    capacity: int
    level: int
    mean_level: float
    fed: int
    batches: int
    epochs: int
    starved: float
    blocked: float
    starved_seconds: float
    blocked_seconds: float
    elapsed: float
    waited: float
    fetching: float
    converting: float
    unseen: bool = False
    source: InputStats | None = None
    loader: LoaderStats | None = None

    @property
    def load(self) -> StageLoad | None:
        """This input as a stage, per batch; None before its first batch."""
        return load_of(self)

    @property
    def verdict(self) -> Verdict | None:
        """What limits the rate: a Loader's stage, an input or the step; None before the second batch."""
        return verdict_of(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the stats as JSON values, with load and verdict."""
        verdict, load = self.verdict, self.load
        return {
            **{name: value for name, value in asdict(self).items() if name not in ("source", "loader")},
            "source": self.source.to_dict() if self.source else None,
            "loader": self.loader.to_dict() if self.loader else None,
            "load": loads_to_list([load])[0] if load else None,
            "verdict": verdict.to_dict() if verdict else None,
        }

    def __repr__(self) -> str:
        limit = f"; {self.verdict.limit} limits" if self.verdict else ""
        return f"<InputStats of {self.name}: {self.batches:,} batches, {self.epochs:,} epochs{limit}>"

    def __str__(self) -> str:
        shares = f"{self.name}: {self.starved:.0%} of steps found it empty, {self.blocked:.0%} of batches found it full"
        return f"{shares}; {self.verdict}" if self.verdict else shares


def loader_stats(source: object) -> LoaderStats | None:
    """The stats of a Loader; None for other sources."""
    stats = getattr(source, "stats", None)
    found = stats() if callable(stats) else None
    return found if isinstance(found, LoaderStats) else None


class Occupancy:
    """Counts for :class:`InputStats`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fed = self._taken = self._levels = self._found_full = self._found_empty = self._epochs = 0
        self._starved = self._blocked = self._waited = self._elapsed = 0.0
        self._fetching = self._converting = 0.0
        self._first: float | None = None  # the time of the current epoch's first batch
        self._unseen = False

    def drew(self, fetching: float, converting: float) -> None:
        """Count a batch: the seconds that the thread waited for it, and worked on it."""
        with self._lock:
            self._fetching += fetching
            self._converting += converting

    def fed(self, level: int, *, full: bool, seconds: float, unseen: bool) -> None:
        """Count a batch that was put at ``level``; it waited ``seconds`` if the queue was ``full``.
        Steps that are ``unseen`` cannot be measured; a level of 0 counts as a step that waited.
        """
        with self._lock:
            self._fed += 1
            self._levels += level
            self._found_full += full
            self._blocked += seconds if full else 0.0
            if unseen:
                self._unseen = True
                self._count_step(waited=0.0 if level == 0 else None)

    def taken(self, *, waited: float | None) -> None:
        """Count a step that got a batch; ``waited`` is its wait in seconds, None for no wait."""
        with self._lock:
            self._count_step(waited=waited)

    def _count_step(self, waited: float | None) -> None:
        self._taken += 1
        self._found_empty += waited is not None
        self._starved += waited or 0.0
        if self._first is None:  # the wait for an epoch's first batch is not typical
            self._first = perf_counter()
        else:
            self._waited += waited or 0.0

    def epoch(self) -> None:
        """Count an epoch that has ended."""
        with self._lock:
            self._epochs += 1
            self._elapsed, self._first = self._elapsed_now(), None

    def _elapsed_now(self) -> float:
        return self._elapsed if self._first is None else self._elapsed + perf_counter() - self._first

    def read(
        self,
        name: str,
        *,
        capacity: int,
        level: int,
        source: InputStats | None = None,
        loader: LoaderStats | None = None,
    ) -> InputStats:
        with self._lock:
            return InputStats(
                name=name,
                capacity=capacity,
                level=level,
                mean_level=self._levels / max(1, self._fed),
                fed=self._fed,
                batches=self._taken,
                epochs=self._epochs,
                starved=self._found_empty / max(1, self._taken),
                blocked=self._found_full / max(1, self._fed),
                starved_seconds=self._starved,
                blocked_seconds=self._blocked,
                elapsed=self._elapsed_now(),
                waited=self._waited,
                fetching=self._fetching,
                converting=self._converting,
                unseen=self._unseen,
                source=source,
                loader=loader,
            )
