"""Stats of an input, and the stage that limits a step's rate."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, ClassVar, Self

from shardprep.loaders.loader.stats import (
    MAX_WAITING_SHARE,
    OR_PREFETCH,
    STEP,
    STEP_ADVICE,
    LoaderStats,
    ShownStats,
    StageLoad,
    Verdict,
    loads_to_list,
    rate_of,
)

STARVED_SHARE = 0.5  # of batches put into an empty queue; above it, a graph's steps count as starved
SOURCE_ADVICE = "the source is slow; where it spends its time is unknown here"
COUNTS = ("fed", "batches", "timed", "epochs")
SECONDS = ("starved_seconds", "blocked_seconds", "elapsed", "waited", "fetching", "converting")
MEANS = {"mean_level": "fed", "blocked": "fed", "starved": "batches"}  # each with the count it is a mean over
PARTS = ("source", "loader", "upstream")  # nested stats in InputStats


def stage_of(stats: InputStats) -> str:
    return "staging" if stats.name == "StagingInput" else "TensorFlow queue"


def _limit_of(stats: InputStats, images: float) -> tuple[str, float, str]:
    """Return the limiting stage up to this input and its thread: name, rate, advice."""
    in_graph = stats.source is not None and stats.source.unseen  # this thread then handles no batches
    if stats.fetching <= stats.converting and not in_graph:
        working = rate_of(stats.converting / _drawn(stats) / images)
        return stage_of(stats), working, "its thread is busy copying; give it arrays aligned to 64 bytes"
    if stats.source is not None:
        return _limit_of(stats.source, images)
    if stats.loader is not None and (found := stats.loader.of_workers()) is not None:
        return found.limit, found.rate, found.advice
    fetched = rate_of(stats.fetching / _drawn(stats) / images)
    if stats.upstream is not None and stats.upstream.limit != STEP:
        advice = stats.upstream.advice
        return stats.upstream.limit, fetched, advice.removesuffix(OR_PREFETCH) if stats.capacity else advice
    return "source", fetched, SOURCE_ADVICE


def _drawn(stats: InputStats) -> int:
    """Return the number of batches drawn from the source; an input without capacity has none put in."""
    return max(1, stats.fed if stats.capacity else stats.batches)


def _rows(stats: InputStats) -> float:
    """Return the mean number of images per batch; 0 without a Loader."""
    if stats.source is not None:
        return _rows(stats.source)
    loader = stats.loader
    return loader.rows / loader.batches if loader is not None and loader.batches else 0.0


@dataclass(frozen=True)
class InputStats(ShownStats):
    """Counts and times of an input since it was made. All times are in seconds.

    ``name`` is the input's class, ``capacity`` the number of batches that it can hold, 0 for an input without
    a queue. ``level`` is the number it holds now, ``mean_level`` the mean when a batch was put in. ``fed``
    batches were put in, ``batches`` were taken out, ``epochs`` have ended. ``starved`` is the fraction of
    steps that found the input empty, ``blocked`` the fraction of batches that found it full; these waited
    ``starved_seconds`` and ``blocked_seconds``. ``timed`` is the number of batches after the very first,
    ``elapsed`` the time within epochs since then, and ``waited`` the part of it in which steps waited. The
    input's thread waited ``fetching`` for the source, and worked ``converting`` on batches. ``source`` has
    the stats of the input that feeds it, ``loader`` those of the Loader, and ``upstream`` the verdict of any
    other source with stats; each may be None.

    If ``unseen``, a graph dequeues, and its waits cannot be measured: then ``starved`` is the fraction of
    batches that were put into an empty queue, and the times of steps are 0.
    """

    kind: ClassVar[str] = "input"

    name: str
    capacity: int
    level: int
    mean_level: float
    fed: int
    batches: int
    timed: int
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
    upstream: Verdict | None = None

    @property
    def load(self) -> StageLoad | None:
        """The load of this input as a stage: its thread's work, and waits for the source and for room.

        None before the first batch.
        """
        if not self.batches or self.elapsed <= 0:
            return None
        seconds = self.converting / _drawn(self)
        return StageLoad(
            stage_of(self),
            "thread",
            seconds=seconds,
            utilisation=min(1.0, self.converting / self.elapsed),
            starved=min(1.0, self.fetching / self.elapsed),
            blocked=min(1.0, self.blocked_seconds / self.elapsed),
            limit=rate_of(seconds),
        )

    @property
    def verdict(self) -> Verdict | None:
        """The limiting stage: one of the Loader, an input or the step. None before the second batch."""
        if not self.timed or self.elapsed <= 0:
            return None
        rows = _rows(self)
        unit, images = ("images", rows) if rows else ("batches", 1.0)
        rate = self.timed * images / self.elapsed
        name, next_rate, advice = _limit_of(self, images)
        waits = self.waited > MAX_WAITING_SHARE * self.elapsed
        if not (self.starved > STARVED_SHARE if self.unseen else waits):
            return Verdict(STEP, rate, name, max(rate, next_rate), STEP_ADVICE, unit)
        if self.unseen:  # the step's own time is not known
            return Verdict(name, rate, "", math.inf, advice, unit)
        step = max(0.0, self.elapsed - self.waited)
        alone = rate_of(step / self.timed / images)
        return Verdict(name, rate, STEP, max(rate, alone), advice, unit)

    def since(self, previous: Self) -> Self:
        """Return the counts since ``previous``, earlier stats of this input: of one epoch, for example.

        ``level`` and ``upstream`` stay current.
        """
        counted = (*COUNTS, *SECONDS)
        changed: dict[str, Any] = {name: getattr(self, name) - getattr(previous, name) for name in counted}
        for name, count in MEANS.items():
            (mean, first), (total, last) = ((getattr(x, name), getattr(x, count)) for x in (previous, self))
            changed[name] = (total * last - mean * first) / (last - first) if last > first else 0.0
        for name in ("source", "loader"):
            before, after = getattr(previous, name), getattr(self, name)
            changed[name] = after.since(before) if before and after else after
        return replace(self, **changed)

    def to_dict(self) -> dict[str, Any]:
        """Return the stats as JSON values, with load and verdict."""
        verdict, load = self.verdict, self.load
        return {
            **{name: value for name, value in vars(self).items() if name not in PARTS},
            **{name: part.to_dict() if (part := getattr(self, name)) else None for name in PARTS},
            "load": loads_to_list([load])[0] if load else None,
            "verdict": verdict.to_dict() if verdict else None,
        }

    def __repr__(self) -> str:
        limit = f"; {self.verdict.limit} limits" if self.verdict else ""
        return f"<InputStats of {self.name}: {self.batches:,} batches, {self.epochs:,} epochs{limit}>"

    def __str__(self) -> str:
        shares = f"{self.name}: {self.starved:.0%} of steps found it empty, {self.blocked:.0%} of batches found it full"
        return f"{shares}; {self.verdict}" if self.verdict else shares


class Occupancy:
    """Counts for :class:`InputStats`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        # the counts and seconds of InputStats, and sums in place of its means
        self._totals: dict[str, Any] = dict.fromkeys((*COUNTS, *MEANS), 0) | dict.fromkeys(SECONDS, 0.0)
        self._since: float | None = None  # when the timed part of the current epoch began
        self._unseen = False

    def drew(self, fetching: float, converting: float) -> None:
        """Record the seconds that the thread waited for a batch, and worked on it."""
        with self._lock:
            self._totals["fetching"] += fetching
            self._totals["converting"] += converting

    def fed(self, level: int, *, full: bool, seconds: float, unseen: bool) -> None:
        """Count a batch that was put in at ``level``, after waiting ``seconds`` if the queue was ``full``.

        Steps that are ``unseen`` cannot be measured; a level of 0 counts as a step that waited.
        """
        with self._lock:
            self._totals["fed"] += 1
            self._totals["mean_level"] += level
            self._totals["blocked"] += full
            self._totals["blocked_seconds"] += seconds if full else 0.0
            if unseen:
                self._unseen = True
                self.taken(waited=0.0 if level == 0 else None)

    def taken(self, *, waited: float | None) -> None:
        """Count a step that got a batch; ``waited`` is its wait in seconds, None for no wait."""
        with self._lock:
            is_timed = self._totals["batches"] > 0  # the wait for the very first batch is not typical
            timed = (waited or 0.0) if is_timed else 0.0
            self._totals["batches"] += 1
            self._totals["timed"] += is_timed
            self._totals["starved"] += waited is not None
            self._totals["starved_seconds"] += waited or 0.0
            self._totals["waited"] += timed
            if self._since is None:
                self._since = perf_counter() - timed

    def epoch(self) -> None:
        with self._lock:
            self._totals["epochs"] += 1
            self._totals["elapsed"], self._since = self._elapsed_now(), None

    def _elapsed_now(self) -> float:
        elapsed: float = self._totals["elapsed"]
        return elapsed if self._since is None else elapsed + perf_counter() - self._since

    def read(self, name: str, *, capacity: int = 0, level: int = 0, source: object = None) -> InputStats:
        """Return the stats of the input ``name``, which draws from ``source``."""
        stats = getattr(source, "stats", None)
        inner = stats() if callable(stats) else None
        with self._lock:
            found = self._totals | {"elapsed": self._elapsed_now()}
            unseen = self._unseen
        found |= {mean: found[mean] / max(1, found[count]) for mean, count in MEANS.items()}
        if isinstance(inner, InputStats):
            found["source"] = inner
        elif isinstance(inner, LoaderStats):
            found["loader"] = inner
        elif isinstance(verdict := getattr(inner, "verdict", None), Verdict):
            found["upstream"] = verdict
        return InputStats(name, capacity, level, unseen=unseen, **found)


def occupancy_of(stats: InputStats) -> dict[str, float]:
    """Return the mean level, and the fractions of steps and batches that found the input empty and full."""
    return {"level": stats.mean_level, "starved": stats.starved, "blocked": stats.blocked}


def scalars_of(stats: InputStats) -> dict[str, float]:
    """Return the occupancy, the rate as ``images_per_second`` or ``batches_per_second``, and the stages.

    ``stage/<name>`` is the fraction of time in which a stage of the Loader or an input works. Rate and stages
    are left out until they are known.
    """
    verdict = stats.verdict
    rate = {f"{verdict.unit}_per_second": verdict.rate} if verdict else {}
    stages = {f"stage/{load.name.replace(' ', '_')}": load.utilisation for load in _loads(stats)}
    return occupancy_of(stats) | rate | stages


def _loads(stats: InputStats) -> Iterator[StageLoad]:
    """Yield the stages from the Loader on, except its last, which is the work of its consumer."""
    if stats.source is not None:
        yield from _loads(stats.source)
    elif stats.loader is not None:
        yield from stats.loader.loads[:-1]
    if stats.load is not None:
        yield stats.load
