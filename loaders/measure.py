"""How fast a loader is: what it delivers to a consumer that does nothing, and where its time goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .loader import Loader
from .timings import EngineStats

WINDOW = 0.5  # seconds over which a rate is taken, so that the median passes over hiccups

Arrival = tuple[float, int]
"""When a batch came, and with how many images."""


@dataclass(frozen=True)
class LoaderSpeed:
    """Rates are medians over windows of half a second or more; ``bytes_per_second`` is of encoded images.

    ``first_batch`` is seconds from the loader's construction. ``gap_p50`` and ``gap_p99`` are seconds
    between batches. ``stages`` are a worker's seconds per image; the shares are of the time measured:
    workers without work, workers without a free slot, and a consumer without a batch (a loader that is the
    bottleneck keeps it waiting all the time). ``main_cpu`` is the consumer's process, in seconds per image.
    """

    images: int
    batches: int
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
    main_cpu: float
    skipped: int
    restarts: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(make: Callable[[], Loader], *, seconds: float) -> LoaderSpeed:
    """Draw epoch after epoch from a new loader, for so long after its first batch, and close it.

    At least one batch is measured after the first. What the loader raises, this raises.
    """
    began = time.perf_counter()
    with make() as loader:
        batches = _endless(loader)
        arrivals = [_next(batches)]
        before, cpu = loader.stats(), time.process_time()
        while len(arrivals) < 2 or arrivals[-1][0] < arrivals[0][0] + seconds:
            arrivals.append(_next(batches))
        after, cpu = loader.stats(), time.process_time() - cpu
        batches.close()
        mean = loader.dataset.manifest.image_bytes / len(loader.dataset)
        skipped = len(loader.skipped)
    return _speed(
        arrivals, before, after, first_batch=arrivals[0][0] - began, cpu=cpu, mean_bytes=mean, skipped=skipped
    )


def _speed(
    arrivals: Sequence[Arrival],
    before: EngineStats,
    after: EngineStats,
    *,
    first_batch: float,
    cpu: float,
    mean_bytes: float,
    skipped: int,
) -> LoaderSpeed:
    images, seconds = sum(n for _, n in arrivals[1:]), arrivals[-1][0] - arrivals[0][0]
    gap_p50, gap_p99 = np.percentile(np.diff([at for at, _ in arrivals]), (50, 99)).tolist()
    rate = float(np.median(window_rates(arrivals, min(WINDOW, seconds))))
    return LoaderSpeed(
        images=images,
        batches=len(arrivals) - 1,
        seconds=seconds,
        first_batch=first_batch,
        images_per_second=rate,
        bytes_per_second=rate * mean_bytes,
        gap_p50=gap_p50,
        gap_p99=gap_p99,
        stages={name: (after.stages[name] - before.stages[name]) / images for name in after.stages},
        idle=(sum(after.waiting) - sum(before.waiting)) / len(after.waiting) / seconds,
        blocked=(after.blocked - before.blocked) / seconds,
        starved=(after.starved - before.starved) / seconds,
        main_cpu=cpu / images,
        skipped=skipped,
        restarts=after.restarts,
    )


def window_rates(arrivals: Sequence[Arrival], width: float) -> list[float]:
    """Images per second in windows of at least ``width`` seconds, each from one batch's arrival to another's.

    What is left at the end belongs to no window.
    """
    rates, (since, images) = [], (arrivals[0][0], 0)
    for at, count in arrivals[1:]:
        images += count
        if at - since >= width:
            rates.append(images / (at - since))
            since, images = at, 0
    return rates


def _endless(loader: Loader) -> Generator[tuple[Any, ...], None, None]:
    while True:
        yield from loader


def _next(batches: Iterator[tuple[Any, ...]]) -> Arrival:
    """The labels are last; the batch is dropped at once, as by a consumer who has used it."""
    labels = next(batches)[-1]
    return time.perf_counter(), len(labels)
