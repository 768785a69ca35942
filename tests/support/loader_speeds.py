"""Made-up speeds of loaders."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardprep.loaders import LoaderStats
from shardprep.loaders.measuring.bench import CacheShares, LoaderSpeed, MemoryUse

DECODING = {"read": 1.0, "decode": 16.0, "augment": 2.0}
READING = {"read": 18.0, "decode": 1.0, "augment": 0.5}


def stats_of(**changes: Any) -> LoaderStats:
    """A thousand images of 100 KB in ten seconds, by two workers on two CPUs that decode all the time."""
    whole = LoaderStats(
        rows=1000,
        timed=1000,
        batches=10,
        elapsed=10.0,
        warming=0.0,
        starved=9.5,
        handing=0.1,
        blocked=0.0,
        filling=(10.0, 10.0),
        waiting=(0.0, 0.0),
        cpu=(19.0,),
        queued=(0.5,),
        stages=DECODING,
        copied=0,
        restarts=0,
        workers=2,
        cpus=2,
        image_bytes=1e5,
        crop_ready=1.0,
    )
    return replace(whole, **changes)


def speed_of(stages: dict[str, float], *, cached: float | None = 1.0) -> LoaderSpeed:
    """The speed of such a run, with workers that are always busy with ``stages``."""
    busy = {"cpu": (9.5, 9.5), "queued": (0.0, 0.0), "starved": 9.8}
    stats = stats_of(batches=100, stages=stages, crop_ready=0, **busy)
    return LoaderSpeed(
        images=1000,
        batches=100,
        batch_size=10,
        seconds=10.0,
        first_batch=0.5,
        images_per_second=100.0,
        bytes_per_second=1e7,
        gap_p50=0.1,
        gap_p99=0.2,
        decoder=None,
        stages={name: seconds / 1000 for name, seconds in stages.items()},
        starved=0.98,
        cpu=0.02,
        main_cpu=0.0001,
        memory=MemoryUse(ring=0, main_peak=None, worker_peak=None, worker_own=None),
        page_cache=CacheShares(cached, cached),
        stats=stats,
        **dict.fromkeys(["idle", "blocked", "skipped", "restarts"], 0),
    )
