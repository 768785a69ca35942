"""Stats of an input, and the stage that limits a step's rate."""

from __future__ import annotations

import math
import threading
from collections import Counter
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, ClassVar

from shardprep.loaders.engine.engine import Meter
from shardprep.loaders.engine.trace import BatchWait
from shardprep.loaders.loader.stats import (
    OR_PREFETCH,
    STEP,
    GroupTimes,
    LoaderStats,
    PipelineStats,
    StageLoad,
    Supplier,
    Verdict,
    loads_to_list,
)

STARVED_SHARE = 0.5  # of batches put into an empty queue; above it, a graph's steps count as starved
SOURCE_ADVICE = "the source is slow; where it spends its time is unknown here"
COPYING_ADVICE = "its thread is busy copying; give it arrays aligned to 64 bytes"


@dataclass(frozen=True, repr=False)
class InputStats(PipelineStats):
    """Counts and times of an input since it was made. All times are in seconds.

    ``name`` is the input's class, ``capacity`` the number of batches that it can hold, 0 for an input without
    a queue. ``level`` is the number it holds now, ``mean_level`` the mean when a batch was put in. ``fed``
    batches were put in, ``batches`` were taken out, ``epochs`` have ended. ``starved`` is the fraction of
    steps that found the input empty, ``blocked`` the fraction of batches that found it full; these waited
    ``starved_seconds`` and ``blocked_seconds``. ``timed`` is the number of batches after the very first,
    ``elapsed`` the time within epochs since then, and ``waited`` the part of it in which steps waited. The
    input's thread waited ``fetching`` for the source, and worked ``converting`` on batches. ``source`` has
    the stats of the input that feeds it, ``loader`` those of the Loader, and ``upstream`` the verdict of any
    other source with stats; each may be None. ``levels``, ``found_empty`` and ``found_full`` are the counts
    behind the mean and the fractions.

    If ``unseen``, a graph dequeues, and its waits cannot be measured: then ``starved`` is the fraction of
    batches that were put into an empty queue, and the times of steps are 0.
    """

    CURRENT: ClassVar = frozenset({"capacity", "level"})
    kind: ClassVar[str] = "input"

    name: str = ""
    capacity: int = 0
    level: int = 0
    fed: int = 0
    levels: int = 0
    batches: int = 0
    timed: int = 0
    epochs: int = 0
    found_empty: int = 0
    found_full: int = 0
    starved_seconds: float = 0.0
    blocked_seconds: float = 0.0
    elapsed: float = 0.0
    waited: float = 0.0
    fetching: float = 0.0
    converting: float = 0.0
    unseen: bool = False
    source: InputStats | None = None
    loader: LoaderStats | None = None
    upstream: Verdict | None = None

    @property
    def mean_level(self) -> float:
        return self.levels / max(1, self.fed)

    @property
    def starved(self) -> float:
        return self.found_empty / max(1, self.batches)

    @property
    def blocked(self) -> float:
        return self.found_full / max(1, self.fed)

    @property
    def _rows(self) -> float:
        """The mean number of images per batch; 0 without a Loader."""
        if self.source is not None:
            return self.source._rows
        loader = self.loader
        return loader.rows / loader.batches if loader is not None and loader.batches else 0.0

    @property
    def unit(self) -> str:
        """The unit of rates: "images" or "batches"."""
        return "images" if self._rows else "batches"

    @property
    def _timed_rows(self) -> float:
        return self.timed * (self._rows or 1.0)

    @property
    def _drawn(self) -> int:
        """The number of batches drawn from the source; an input without capacity has none put in."""
        return max(1, self.fed if self.capacity else self.batches)

    @property
    def _thread(self) -> GroupTimes:
        stage = "staging" if self.name == "StagingInput" else "TensorFlow queue"
        return GroupTimes(stage, "thread", 1, {stage: self.converting}, self.fetching, self.blocked_seconds)

    @property
    def load(self) -> StageLoad | None:
        """The load of this input as a stage: its thread's work, and waits for the source and for room.

        None before the first batch.
        """
        known = self.batches and self.elapsed > 0
        return self._thread.loads(self._drawn, self.elapsed)[0] if known else None

    @property
    def _waited(self) -> float:
        """The seconds in which steps waited; of a graph's, all or none."""
        return self.waited if not self.unseen else self.elapsed * (self.starved > STARVED_SHARE)

    @property
    def _main_times(self) -> GroupTimes:
        step = max(0.0, self.elapsed - self._waited)
        return GroupTimes("main", "main", 1, {STEP: step}, self._waited)

    def suppliers(self) -> list[Supplier]:
        """Return those of the input or Loader that feeds this one, or the source; and this input's thread."""
        waited, before = self._waited, self.source or self.loader
        drawn = [*before.suppliers(), before.as_supplier()] if before and before.is_known else []
        suppliers = [each._replace(waited=waited) for each in drawn]
        rows = self._drawn * (self._rows or 1.0)
        if not suppliers:
            name, advice = "source", SOURCE_ADVICE
            if self.upstream is not None and self.upstream.limit != STEP:
                name, advice = self.upstream.limit, self.upstream.advice
                advice = advice.removesuffix(OR_PREFETCH) if self.capacity else advice
            drawing = GroupTimes(name, "thread", 1, {name: self.fetching}, blocked=self.blocked_seconds)
            loads = drawing.loads(rows, self.elapsed)
            suppliers.append(Supplier(loads, waited, lambda slowest, rate: advice))
        own = self._thread.loads(rows, self.elapsed)
        return [*suppliers, Supplier(own, waited, lambda slowest, rate: COPYING_ADVICE)]

    @property
    def verdict(self) -> Verdict | None:
        """The limiting stage: one of the Loader, an input or the step. None before the second batch."""
        verdict = super().verdict
        if verdict and self.unseen and verdict.limit != STEP:  # the step's own time is not known
            return replace(verdict, next_limit="", next_rate=math.inf)
        return verdict

    def to_dict(self) -> dict[str, Any]:
        """Return the stats as JSON values, with load and verdict."""
        parts = {name: getattr(self, name) for name in ("source", "loader", "upstream")}
        return {
            **super().to_dict(),
            **{name: getattr(self, name) for name in ("mean_level", "starved", "blocked")},
            **{name: part.to_dict() if part else None for name, part in parts.items()},
            "load": loads_to_list([self.load])[0] if self.load else None,
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
        self._meter = Meter()  # of the steps
        self._totals: Any = Counter()  # the other counts and seconds of InputStats
        self._unseen = False

    def count_draw(self, fetching: float, converting: float) -> None:
        """Record the seconds that the thread waited for a batch, and worked on it."""
        with self._lock:
            self._totals.update(fetching=fetching, converting=converting)

    def count_put(self, level: int, *, full: bool, seconds: float, unseen: bool) -> None:
        """Count a batch that was put in at ``level``, after waiting ``seconds`` if the queue was ``full``.

        Steps that are ``unseen`` cannot be measured; a level of 0 counts as a step that waited.
        """
        with self._lock:
            waited = seconds if full else 0.0
            self._totals.update(fed=1, levels=level, found_full=int(full), blocked_seconds=waited)
            if unseen:
                self._unseen = True
                self.count_step(waited=0.0 if level == 0 else None)

    def count_step(self, *, waited: float | None) -> None:
        """Count a step that got a batch; ``waited`` is its wait in seconds, None for no wait."""
        with self._lock:
            now = perf_counter()
            self._meter.count(BatchWait(0, 0, 1, now - (waited or 0.0), now, now))
            self._totals.update(found_empty=int(waited is not None))

    def count_epoch(self) -> None:
        with self._lock:
            self._totals.update(epochs=1)
            self._meter.pause()

    def read(self, name: str, *, capacity: int = 0, level: int = 0, source: object = None) -> InputStats:
        """Return the stats of the input ``name``, which draws from ``source``."""
        stats = getattr(source, "stats", None)
        inner = stats() if callable(stats) else None
        verdict = getattr(inner, "verdict", None)
        own: Any = {"source": inner} if isinstance(inner, InputStats) else {}
        if isinstance(inner, LoaderStats):
            own["loader"] = inner
        elif not own and isinstance(verdict, Verdict):
            own["upstream"] = verdict
        with self._lock:
            meter = self._meter
            own |= {each: getattr(meter, each) for each in ("batches", "timed", "elapsed")}
            own |= {"waited": meter.starved, "starved_seconds": meter.waiting, "unseen": self._unseen}
            return InputStats(name, capacity, level, **own, **self._totals)


def occupancy_of(stats: InputStats) -> dict[str, float]:
    """Return the mean level, and the fractions of steps and batches that found the input empty and full."""
    return {"level": stats.mean_level, "starved": stats.starved, "blocked": stats.blocked}


def scalars_of(stats: InputStats) -> dict[str, float]:
    """Return the occupancy, the rate as ``images_per_second`` or ``batches_per_second``, and the stages.

    ``stage/<name>`` is the fraction of time in which a stage of the Loader or an input works; of another
    source, in which the input waits for it, by the name of its slowest stage. Rate and stages are left out
    until they are known.
    """
    verdict = stats.verdict
    rate = {f"{verdict.unit}_per_second": verdict.rate} if verdict else {}
    stages = {f"stage/{load.name.replace(' ', '_')}": load.utilisation for load in stats.loads[:-1]}
    return occupancy_of(stats) | rate | stages
