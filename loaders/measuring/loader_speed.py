"""Measuring a loader: its rate with a consumer that does nothing, and its times."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

from shardprep.loaders.loader.bottleneck import Verdict
from shardprep.loaders.loader.loader import Loader
from shardprep.loaders.loader.stats import LoaderStats
from shardprep.loaders.measuring.disk.page_cache import resident_share

from .arrivals import Arrivals
from .memory_use import MemoryUse, worker_pids
from .progress_bar import LoaderBar
from .recording import tracing

MIN_FULL_BATCHES = 5  # in a shorter run, batches that were begun before it or end after it change the figures
MAX_CHECKED_SHARDS = 64  # for the page cache: checking takes 5 ms per GB


@dataclass(frozen=True)
class CacheShares:
    """The shares of the shards' pages in memory before and after; None where the system reports none."""

    before: float | None
    after: float | None


@dataclass(frozen=True)
class LoaderSpeed:
    """The measured speed of a loader.

    Rates are medians over windows of half a second or more; ``bytes_per_second`` is of encoded images.
    ``first_batch`` is seconds from the loader's construction. ``gap_p50`` and ``gap_p99`` are seconds between
    batches. ``stages`` are a worker's seconds per image. ``idle``, ``blocked`` and ``starved`` are shares of
    the time: workers without work, workers without a free slot, and a consumer without a batch (nearly 1 if
    the loader is the bottleneck). ``cpu`` is CPU seconds per image of all processes, of which ``main_cpu`` is
    the consumer's. ``stats`` are the loader's for the measured time.
    """

    images: int
    batches: int
    batch_size: int
    seconds: float
    first_batch: float
    images_per_second: float
    bytes_per_second: float
    gap_p50: float
    gap_p99: float
    stages: dict[str, float]
    idle: float
    blocked: float
    starved: float
    cpu: float
    main_cpu: float
    skipped: int
    restarts: int
    memory: MemoryUse
    page_cache: CacheShares
    stats: LoaderStats

    @property
    def verdict(self) -> Verdict | None:
        """The stage that limited; None where that is unknown, as it is after too short a run."""
        return None if self.is_too_short else self.stats.verdict

    @property
    def is_too_short(self) -> bool:
        """Whether fewer images were measured than five full batches have."""
        return self.images < MIN_FULL_BATCHES * self.batch_size

    @property
    def sentence(self) -> str:
        """The stage that limited, or that the run was too short to tell, as a sentence."""
        if not self.is_too_short:
            return str(self.stats)
        return (
            f"Too short to tell what limits: {self.images:,} images in {self.seconds:.1f} s are fewer than "
            f"{MIN_FULL_BATCHES} batches of {self.batch_size:,}; measure longer, or make batches smaller."
        )

    def to_json(self) -> dict[str, Any]:
        """Return a value of JSON types; docs/reference/bench-loader.md lists the keys."""
        names = [f.name for f in fields(self)]
        values: dict[str, Any] = {name: getattr(self, name) for name in names}
        parts = {name: asdict(values[name]) for name in ("memory", "page_cache")}
        verdict = self.verdict.to_dict() if self.verdict else None
        return {**values, **parts, "stats": {**self.stats.to_dict(), "verdict": verdict}}


def measure(
    make: Callable[[], Loader],
    *,
    seconds: float,
    trace: str | os.PathLike[str] | None = None,
    watched: bool = False,
) -> LoaderSpeed:
    """Draw epochs from a new loader for ``seconds`` after its first batch, and close it.

    ``make`` makes the loader. At least one batch is measured after the first; there is a verdict after five
    full ones. ``trace`` names a file for a Chrome trace; None for none. ``watched`` shows a bar on a terminal
    or in a notebook. Raises what the loader raises, and OSError where the trace cannot be written.
    """
    others, began = worker_pids(), time.perf_counter()
    with make() as loader:
        cached = _cached(loader)
        drawn = _DrawnBatches(loader, seconds, trace=trace, watched=watched)
        return drawn.speed(
            first_batch=drawn.arrivals.first - began,
            memory=MemoryUse.now(worker_pids() - others, ring=loader.engine.shared_bytes),
            page_cache=CacheShares(cached, _cached(loader)),
        )


class _DrawnBatches:
    """The batches that a loader delivered, and its stats before and after."""

    def __init__(
        self, loader: Loader, seconds: float, *, trace: str | os.PathLike[str] | None, watched: bool
    ) -> None:
        self._loader = loader
        with ExitStack() as stack:
            recorded = stack.enter_context(tracing(loader)) if trace else None
            bar = stack.enter_context(LoaderBar(loader, shown=watched))
            batches = stack.enter_context(closing(_endless(loader)))
            self.arrivals = Arrivals(bar.over(batches), _images_in)
            self.arrivals.draw()
            self._before, cpu = loader.stats(), time.process_time()
            self.arrivals.draw_for(seconds)
            self._after, self._cpu = loader.stats(), time.process_time() - cpu
        if recorded and trace:
            recorded.save(trace)

    def speed(self, *, first_batch: float, memory: MemoryUse, page_cache: CacheShares) -> LoaderSpeed:
        arrivals = self.arrivals
        images, seconds, rate = arrivals.amount, arrivals.seconds, arrivals.rate
        stats = _without_step(self._after.since(self._before), seconds)
        gap_p50, gap_p99 = arrivals.gaps
        return LoaderSpeed(
            images=images,
            batches=arrivals.count,
            batch_size=self._loader.engine.layout.rows,
            seconds=seconds,
            first_batch=first_batch,
            images_per_second=rate,
            bytes_per_second=rate * stats.image_bytes,
            gap_p50=gap_p50,
            gap_p99=gap_p99,
            stages={name: spent / images for name, spent in stats.stages.items()},
            idle=sum(stats.waiting) / len(stats.waiting) / seconds,
            blocked=stats.blocked / seconds,
            starved=stats.starved / seconds,
            cpu=(self._cpu + _of_workers(stats)) / images,
            main_cpu=self._cpu / images,
            skipped=len(self._loader.skipped),
            restarts=self._after.restarts,
            memory=memory,
            page_cache=page_cache,
            stats=stats,
        )


def _images_in(batch: tuple[Any, ...]) -> int:
    """Number of images of a batch: the length of its labels, which are last."""
    return len(batch[-1])


def _without_step(stats: LoaderStats, seconds: float) -> LoaderStats:
    """Return the stats of so many seconds without a training step: a consumer that drops batches has none."""
    return replace(
        stats, elapsed=seconds, handing=max(stats.handing, seconds - stats.starved - stats.storage.limiting)
    )


def _of_workers(stats: LoaderStats) -> float:
    """CPU seconds of the worker processes."""
    return sum(stats.cpu) if stats.workers else 0.0


def _cached(loader: Loader) -> float | None:
    """The share of the shards' bytes in memory; of many shards, some that are evenly chosen."""
    names = loader.dataset.image_files
    count = min(len(names), MAX_CHECKED_SHARDS)
    some = [names[number * len(names) // count] for number in range(count)]
    try:
        shares = [resident_share(path) for path in some]
        sizes = [path.stat().st_size for path in some]
    except OSError:
        return None
    return float(np.average(shares, weights=sizes)) if sum(sizes) else None


def _endless(loader: Loader) -> Generator[tuple[Any, ...], None, None]:
    while True:
        yield from loader
