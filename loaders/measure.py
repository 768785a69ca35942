"""Measuring a loader: what it delivers to a consumer that does nothing, and where its time goes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import numpy as np

from .arrivals import Arrivals
from .disk.page_cache import resident_share
from .live import LoaderBar
from .loader import Loader
from .loader_speed import CacheShares, LoaderSpeed
from .loader_stats import LoaderStats
from .process_memory import MemoryUse, worker_pids
from .trace import tracing

LOOKED_AT = 64  # shards at most, for the page cache: to ask takes 5 ms per GB


def measure(
    make: Callable[[], Loader],
    *,
    seconds: float,
    trace: str | os.PathLike[str] | None = None,
    watched: bool = False,
) -> LoaderSpeed:
    """Draw epoch after epoch from a new loader, for so long after its first batch, and close it.

    At least one batch is measured after the first. ``trace`` names a file that gets a Chrome trace;
    ``watched`` draws a bar on stderr, where that is a terminal. What the loader raises, this raises.
    """
    others, began = worker_pids(), time.perf_counter()
    with make() as loader:
        cached = _cached(loader)
        drawn = _Drawn(loader, seconds, trace=trace, watched=watched)
        return drawn.speed(
            first_batch=drawn.arrivals.first - began,
            memory=MemoryUse.now(worker_pids() - others, ring=loader._engine.shared_bytes),
            page_cache=CacheShares(cached, _cached(loader)),
        )


class _Drawn:
    """What a loader delivered, and what it said before and after."""

    def __init__(
        self, loader: Loader, seconds: float, *, trace: str | os.PathLike[str] | None, watched: bool
    ) -> None:
        self._loader = loader
        with ExitStack() as stack:
            recorded = stack.enter_context(tracing(loader)) if trace else None
            bar = stack.enter_context(LoaderBar(loader, shown=watched))
            batches = stack.enter_context(closing(_endless(loader)))
            self.arrivals = Arrivals(map(bar.passed, batches), _images_in)
            self.arrivals.draw()
            self._before, cpu = loader.stats(), time.process_time()
            self.arrivals.draw_for(seconds)
            self._after, self._cpu = loader.stats(), time.process_time() - cpu
        if recorded and trace:
            recorded.save(trace)

    def speed(self, *, first_batch: float, memory: MemoryUse, page_cache: CacheShares) -> LoaderSpeed:
        arrivals, stats = self.arrivals, _without_step(self._after.since(self._before))
        images, seconds, rate = arrivals.amount, arrivals.seconds, arrivals.rate
        gap_p50, gap_p99 = arrivals.gaps
        return LoaderSpeed(
            images=images,
            batches=arrivals.count,
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
    """The labels are last."""
    return len(batch[-1])


def _without_step(stats: LoaderStats) -> LoaderStats:
    """A consumer that does nothing with batches but to give them back has no step of its own."""
    return replace(stats, handing=max(stats.handing, stats.elapsed - stats.starved))


def _of_workers(stats: LoaderStats) -> float:
    """CPU seconds of other processes."""
    return sum(stats.cpu) if stats.workers else 0.0


def _cached(loader: Loader) -> float | None:
    """The share of the shards that is in memory, by bytes; of many shards, some that lie evenly."""
    shards = loader.dataset.manifest.shards
    count = min(len(shards), LOOKED_AT)
    some = [shards[number * len(shards) // count] for number in range(count)]
    try:
        shares = [resident_share(loader.dataset.path / shard.name) for shard in some]
    except OSError:
        return None
    sizes = [shard.size for shard in some]
    return float(np.average(shares, weights=sizes)) if sum(sizes) else None


def _endless(loader: Loader) -> Generator[tuple[Any, ...], None, None]:
    while True:
        yield from loader
